"""What the readers of idioms share: how a reading fails, calls of opaque ops, and what a sentence calls things."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.fx import Graph, Node

from fusion_passes.graph.arguments import arguments, tensor_node
from fusion_passes.graph.read import (
    ALIASES,
    COPIES,
    argument,
    aten,
    calls,
    is_functionalized,
    is_noop,
    is_tensor,
    value,
)
from fusion_passes.idioms.idiom import Idiom, NearMiss

FoundIdiom = TypeVar("FoundIdiom", bound=Idiom)


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


def reduced_along_last(node: Node, *targets: object) -> Node | None:
    """What a call of one of these reductions reduces along its last dimension alone, whether that is kept or not; None
    for anything else."""
    said = arguments(node, "self", "dim", "keepdim") if calls(node, *targets) else None
    source = tensor_node(said[0]) if said is not None else None
    if said is None or source is None:
        return None
    dims = list(said[1]) if isinstance(said[1], (list, tuple)) else [said[1]]
    return source if value(source).ndim and dims in ([-1], [value(source).ndim - 1]) else None


def ancestors(node: Node, levels: int | None = None, but_not: Collection[object] = ()) -> Iterator[Node]:
    """`node`, then what it is computed from, level by level: at most so many above it, and nothing that a call of
    `but_not` is computed from."""
    seen, level = {node}, [node]
    while level:
        yield from level
        if levels == 0:
            return
        levels = None if levels is None else levels - 1
        above = dict.fromkeys(x for n in level if not calls(n, *but_not) for x in n.all_input_nodes)
        level = [x for x in above if x not in seen]
        seen.update(level)


def depends_on(node: Node, target: Node) -> bool:
    """True where `node` is computed from `target`."""
    return target in ancestors(node)


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


def is_start(sliced: Node) -> bool:
    """True for a slice that takes the first elements of a dimension, one after the other."""
    said = arguments(sliced, "self", "dim", "start", "end", "step") if calls(sliced, aten.slice.Tensor) else None
    return said is not None and said[2] in (0, None) and said[4] == 1


def is_4d(arg: object) -> bool:
    """True for a node that produces a tensor of four dimensions."""
    return isinstance(arg, Node) and is_tensor(arg) and value(arg).ndim == 4


def without_copies(node: Node) -> Node:
    """Up through what changes neither elements nor shape."""
    while (calls(node, *COPIES, *ALIASES) or is_noop(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def show(arg: object) -> str:
    """An argument of a call, for a sentence."""
    return arg.name if isinstance(arg, Node) else repr(arg)
