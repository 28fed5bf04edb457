"""What the readers of idioms share: constants, scalar factors, and how a reading fails."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node

from fusion_passes.graph.read import (
    COPIES,
    argument,
    aten,
    calls,
    is_functionalized,
    is_noop,
    is_tensor,
    is_view,
    prims,
    same_shape,
    value,
)
from fusion_passes.idioms.idiom import Idiom, NearMiss

FoundIdiom = TypeVar("FoundIdiom", bound=Idiom)

CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})
MULTIPLICATIONS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})


class Unread(Exception):
    """The reading stopped at `node`: the reason is a sentence for the user."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def read_all(
    graph: Graph, what: str, read: Callable[[Node], FoundIdiom | None], *, last_first: bool = False
) -> Iterator[FoundIdiom | NearMiss]:
    """What `read` finds at the calls of a graph, in graph order or the other way round, and where it stopped.  Never
    raises."""
    for node in reversed(graph.nodes) if last_first else graph.nodes:
        if node.op != "call_function":
            continue
        try:
            found = read(node)
        except Unread as failure:
            yield NearMiss(node, what, failure.reason)
        except Exception as error:
            yield NearMiss(node, what, f"could not be read: {error}")
        else:
            if found is not None:
                yield found


_WITHOUT_VALUE = frozenset({"memory_format", "non_blocking", "pin_memory", "implicit"})
"""Arguments that say where a result lies or how it is copied, never what it is."""


def arguments(node: object, *names: str) -> tuple[Any, ...] | None:
    """The arguments of these names of a call of an op, its defaults filled in: all that a reader looks at.

    None where the call says more: an argument that is not named has another value than its default, so that the op
    computes something else than the reader thinks (`alpha` of a sum, `dtype` of a reduction); and where the node is no
    call of an op, or its op lacks one of the names."""
    schema = getattr(node.target, "_schema", None) if isinstance(node, Node) and node.op == "call_function" else None
    if not isinstance(node, Node) or schema is None:
        return None
    given = {a.name: argument(node, i, a.name, a.default_value) for i, a in enumerate(schema.arguments)}
    for a in schema.arguments:
        said, unsaid = given[a.name], a.default_value
        if a.name not in names and a.name not in _WITHOUT_VALUE and (isinstance(said, Node) or said != unsaid):
            return None
    return tuple(given[name] for name in names) if all(name in given for name in names) else None


def operands(node: object, *targets: object) -> tuple[Any, Any] | None:
    """Both operands of a call of one of these binary ops; None for anything else, and where the call says more."""
    return arguments(node, "self", "other") if calls(node, *targets) else None


def reduced_along_last(node: Node, *targets: object) -> Node | None:
    """What a call of one of these reductions reduces along its last dimension alone, whether that is kept or not; None
    for anything else."""
    said = arguments(node, "self", "dim", "keepdim") if calls(node, *targets) else None
    source = tensor_node(said[0]) if said is not None else None
    if said is None or source is None:
        return None
    dims = list(said[1]) if isinstance(said[1], (list, tuple)) else [said[1]]
    return source if value(source).ndim and dims in ([-1], [value(source).ndim - 1]) else None


def number(arg: object) -> float | None:
    """A Python number in the graph (no symbolic one, no bool), or None."""
    return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None


def constant(arg: object) -> float | None:
    """The number that every element of `arg` is: a Python number, or a tensor filled with one; None if unknown."""
    if not isinstance(arg, Node):
        return number(arg)
    if calls(arg, aten.full.default, aten.scalar_tensor.default):
        name = "fill_value" if calls(arg, aten.full.default) else "s"
        said = arguments(arg, name, *_FACTORY, *(("size",) if name == "fill_value" else ()))
        held = None if said is None else float(said[0]) if isinstance(said[0], bool) else number(said[0])
    elif (is_view(arg) or calls(arg, aten.expand.default, *CASTS)) and arg.all_input_nodes:
        held = constant(arg.all_input_nodes[0])
    else:
        return None
    return held if held is None or not is_tensor(arg) else _held_as(held, value(arg).dtype)


_FACTORY = ("dtype", "layout", "device")
"""What the tensor that an op makes tells, see its meta value."""


def _held_as(held: float, dtype: torch.dtype) -> float | None:
    """A number as a tensor of this dtype holds it; None where that is not defined."""
    if dtype.is_floating_point or dtype is torch.bool:
        return float(torch.tensor(held, dtype=torch.float64, device="cpu").to(dtype))
    if dtype.is_complex or not math.isfinite(held):
        return None
    fits = torch.iinfo(dtype).min <= math.trunc(held) <= torch.iinfo(dtype).max
    return float(math.trunc(held)) if fits else None


def is_cast(node: object) -> bool:
    """True for a cast between floating-point dtypes, on one device."""
    if not (isinstance(node, Node) and calls(node, *CASTS) and node.all_input_nodes and is_tensor(node)):
        return False
    source = node.all_input_nodes[0]
    if not is_tensor(source) or value(source).device != value(node).device:
        return False
    return value(source).dtype.is_floating_point and value(node).dtype.is_floating_point


def is_exact_cast(node: object) -> bool:
    """True for a floating-point cast that loses nothing: to the same dtype, or from 16 to 32 bits and the like."""
    if not (isinstance(node, Node) and is_cast(node)):
        return False
    before, after = value(node.all_input_nodes[0]).dtype, value(node).dtype
    return before == after or 2 <= before.itemsize < after.itemsize


def is_high_precision(node: object) -> bool:
    """True for a floating-point tensor of 16 bits or more."""
    return isinstance(node, Node) and is_tensor(node) and _high_precision(value(node).dtype)


def _high_precision(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def has_one_element(node: Node) -> bool:
    """True where the tensor has provably one element, whatever its rank."""
    shape = value(node).shape
    return same_shape(shape, [1] * len(shape))


def is_finite(*numbers: float) -> bool:
    """True where no number is an infinity or a NaN."""
    return all(math.isfinite(x) for x in numbers)


def depends_on(node: Node, target: Node) -> bool:
    """True where `node` is computed from `target`."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current is target:
            return True
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return False


def shape_of(node: Node) -> str:
    """The shape as a user reads it: `[s0, 1]`."""
    return "[" + ", ".join(str(size) for size in value(node).shape) + "]"


def op_name(node: Node) -> str:
    """The op of a node as a user knows it: `aten.tanh`, or the node's own name where it is no call."""
    schema = getattr(node.target, "_schema", None)
    if schema is None and is_functionalized(node):
        schema = node.args[0]._schema  # type: ignore[union-attr]
    if schema is not None:
        return str(schema.name).replace("::", ".")
    return getattr(node.target, "__name__", node.name) if node.op == "call_function" else node.name


def made_by(node: Node) -> Node:
    """The call whose result `node` is: of several, or of what functionalisation wrapped."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def schema_name(node: Node) -> str:
    """`namespace::op` without the overload, or "" for what is no torch op."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if node.op == "call_function" and schema is not None else ""


@dataclass(frozen=True, eq=False)
class OpCall:
    """One result of a call of an op, also of one that writes to its arguments, which functionalisation has wrapped.

    name: `namespace::op`.  arguments: all, by their names in the schema.  output: the node that holds the result.
    nodes: what computes it.
    written: the argument whose new value the result is; "" for what the op returns.
    whole: False where the op writes to a part of that tensor only, so that the result is more than what it wrote.
    """

    name: str
    arguments: Mapping[str, object]
    output: Node
    nodes: frozenset[Node]
    written: str = ""
    whole: bool = True

    @property
    def defaults(self) -> Mapping[str, object]:
        """Of the arguments that have one."""
        call = made_by(self.output)
        schema = getattr(call.target, "_schema", None) or call.args[0]._schema  # type: ignore[union-attr]
        return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


def op_call(node: Node, among: Collection[str]) -> OpCall | None:
    """The call, of one of the ops named, whose result `node` holds; None for anything else."""
    if (schema := getattr(node.target, "_schema", None)) is not None:
        if schema.name not in among:
            return None
        given = {a.name: argument(node, i, a.name, a.default_value) for i, a in enumerate(schema.arguments)}
        return OpCall(str(schema.name), given, node, frozenset({node}))
    if node.target is not operator.getitem:
        return None
    call, index = node.args
    if not isinstance(call, Node) or not is_functionalized(call):
        return None
    schema = call.args[0]._schema  # type: ignore[union-attr]
    if schema.name not in among or not isinstance(index, int):
        return None
    given = {a.name: call.kwargs.get(a.name, a.default_value) for a in schema.arguments}
    base_of = _written_bases(call, schema)
    bases = call.kwargs.get("_all_bases")
    if isinstance(bases, (list, tuple)):
        given |= {name: bases[base] for name, base in base_of.items()}
    written = [name for name, base in base_of.items() if base == index - max(len(schema.returns), 1)]
    if len(written) > 1:
        return None
    name = written[0] if written else ""
    partial = any(f"_{name}_{part}" in call.kwargs for part in ("size", "slice_dim"))
    return OpCall(str(schema.name), given, node, frozenset({node, call}), name, not partial)


def _written_bases(call: Node, schema: torch.FunctionSchema) -> dict[str, int]:
    """Of each tensor that the wrapped op writes to, at which place its new value is among all that are written: by
    position in the first version of the wrapper, where each is one; as the second version says."""
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if "_all_bases" not in call.kwargs:
        return {name: i for i, name in enumerate(names)}
    found = {name: call.kwargs.get(f"_{name}_base_index") for name in names}
    return {name: base for name, base in found.items() if isinstance(base, int)}


def tensor_node(arg: object) -> Node | None:
    """`arg` where it is a node that produces one tensor, else None."""
    return arg if isinstance(arg, Node) and is_tensor(arg) else None


def is_start(sliced: Node) -> bool:
    """True for a slice that takes the first elements of a dimension, one after the other."""
    said = arguments(sliced, "self", "dim", "start", "end", "step") if calls(sliced, aten.slice.Tensor) else None
    return said is not None and said[2] in (0, None) and said[4] == 1


def is_4d(arg: object) -> bool:
    """True for a node that produces a tensor of four dimensions."""
    return isinstance(arg, Node) and is_tensor(arg) and value(arg).ndim == 4


def without_copies(node: Node) -> Node:
    """Up through what changes neither elements nor shape."""
    while (calls(node, *COPIES, aten.alias.default, aten.detach.default) or is_noop(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def show(arg: object) -> str:
    """An argument of a call, for a sentence."""
    return arg.name if isinstance(arg, Node) else repr(arg)
