"""Reading a post-grad FX graph: what a node computes, what it is a view of, who sees it, what it writes to.

Everything here only looks.  Shapes are judged by the meta values that Inductor put on the nodes, never by the size
arguments of a `reshape` (they go symbolic when a dimension does).  Every question about a symbolic size is asked with
`known`, which adds no guard: what is not provable is "no".
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes.graph.symbolic import known, same

aten = torch.ops.aten
prims = torch.ops.prims

CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})

RESHAPES = frozenset({aten.reshape.default, aten.view.default, aten._unsafe_view.default})
"""Ops that keep the order of the elements, and copy where the strides leave no other way."""

UNIT_DIMENSIONS = frozenset({aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
"""Ops that add or drop dimensions of size 1."""

ALIASES = frozenset({aten.alias.default, aten.detach.default})
"""Ops that give their input back under another name."""

COPIES = frozenset({aten.clone.default, aten.contiguous.default})
"""Ops that change the memory layout and nothing else: a copy moves elements, it does not change them."""

PERMUTATIONS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
"""Ops that put the elements into another order, counted row by row."""

VIEWS = RESHAPES | UNIT_DIMENSIONS | ALIASES | COPIES | PERMUTATIONS
"""Ops whose output has the elements of their input, each once, at another place or in another order."""

PARTS = frozenset({aten.select.int, aten.slice.Tensor})
"""Ops that take a part of a tensor along one dimension."""

SPLITS = frozenset(
    {
        aten.split_with_sizes.default,
        aten.split.Tensor,
        aten.unbind.int,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)
"""Ops that give the parts of a tensor along one dimension, as a tuple.  (`chunk` and `tensor_split` become such.)"""

PERHAPS_VIEWS = PARTS | SPLITS | {operator.getitem, aten.expand.default, *CASTS}
"""Ops that are views where they provably give all of a tensor, unchanged."""

META_ONLY = frozenset({aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default})
"""Ops that ask what a tensor is like, and read none of its elements."""

_OWN_LAYERS = tuple(f"{Path(__file__).parents[1]}/{name}" for name in ("nn/", "ops/", "quant.py"))


def target_name(node: Node) -> str:
    """What `node` calls, for a sentence; of a call with several results, which one."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return f"{target_name(node.args[0])}[{node.args[1]}]"
    return str(node.target) if node.op == "call_function" else node.op


def calls(node: object, *targets: object) -> bool:
    """True where `node` is a call of one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def value(node: Node) -> Tensor:
    """The fake tensor that `node` produces (shape, strides, dtype, device).  Raises TypeError if it is no tensor."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        raise TypeError(f"{node.name} has no tensor value in this graph (meta 'val' is {type(val).__name__})")
    return val


def is_tensor(arg: object) -> bool:
    """True for a node that produces one tensor; False for a Python number, a SymInt node, a tuple."""
    return isinstance(arg, Node) and isinstance(arg.meta.get("val"), Tensor)


def is_high_precision(node: object) -> bool:
    """True for a floating-point tensor of 16 bits or more."""
    if not (isinstance(node, Node) and is_tensor(node)):
        return False
    return value(node).dtype.is_floating_point and value(node).dtype.itemsize >= 2


def has_one_element(node: Node) -> bool:
    """True where the tensor has provably one element, whatever its rank."""
    return same_shape(value(node).shape, [1] * value(node).ndim)


def argument(node: Node, position: int, name: str, default: object = None) -> object:
    """An argument of a call however it was passed: by position, by name, or not at all."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def same_shape(a: Iterable[int | torch.SymInt], b: Iterable[int | torch.SymInt]) -> bool:
    """True where two shapes (or stride tuples) are provably equal."""
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(map(same, a, b))


def same_layout(a: Tensor, b: Tensor) -> bool:
    """True where two tensors of one shape provably have the same strides; those of dimensions of size 1 say nothing."""
    return all(known(size == 1) or known(x == y) for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def is_contiguous(x: Tensor) -> bool:
    """True where the elements provably lie in memory row by row."""
    step: int | torch.SymInt = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not (known(size == 1) or known(stride == step)):
            return False
        step = step * size
    return True


def is_noop(node: Node) -> bool:
    """True for an op that gives its input back: a cast to the same dtype, an `expand` or `slice` to the same shape."""
    if calls(node, *CASTS, aten.expand.default, aten.slice.Tensor):
        (source,) = node.all_input_nodes[:1]
        if not (is_tensor(source) and is_tensor(node)):
            return False
        before, after = value(source), value(node)
        return before.dtype == after.dtype and before.device == after.device and same_shape(before.shape, after.shape)
    return False


def is_view(node: Node) -> bool:
    """True for an op whose output has the elements of its input, each once: one in `VIEWS`, one that changes nothing,
    and what takes all of a tensor: `x[0]` of one row, a split into one part.

    Such a split is two nodes, the call and the part that is taken from its tuple; each counts as a view."""
    if node.op != "call_function":
        return False
    return node.target in VIEWS or (node.target in PERHAPS_VIEWS and (is_noop(node) or _takes_all(node)))


def view_source(node: Node) -> Node | None:
    """The tensor that a view is of, also where the view is the part of a split; None where it has none."""
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is not None and node.target is operator.getitem and calls(source, *SPLITS):
        source = source.all_input_nodes[0]
    return source if is_tensor(source) else None


def keeps_order(node: Node) -> bool:
    """True for a view that leaves element n at place n, counted row by row."""
    return is_view(node) and not calls(node, *PERMUTATIONS)


def _takes_all(node: Node) -> bool:
    """True for a part or an `expand` that provably gives all elements, each once; and for the split that such a part is
    of."""
    if calls(node, *SPLITS):
        return _is_of_one_part(node)
    if node.target is operator.getitem:
        split = node.args[0]
        return isinstance(split, Node) and calls(split, *SPLITS) and _is_of_one_part(split)
    if not calls(node, *PARTS, aten.expand.default):
        return False
    source = view_source(node)
    return source is not None and is_tensor(node) and known(value(source).numel() == value(node).numel())


def _is_of_one_part(split: Node) -> bool:
    parts, source = split.meta.get("val"), view_source(split)
    if source is None or not isinstance(parts, (list, tuple)) or len(parts) != 1:
        return False
    return isinstance(parts[0], Tensor) and known(parts[0].numel() == value(source).numel())


def through_views(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Walk up from `node` past views and no-ops: the first node that computes something, and the views passed, in the
    order in which the graph applies them (the last one is `node` itself, unless `node` is no view)."""
    path: list[Node] = []
    while is_view(node):
        path.append(node)
        node = node.all_input_nodes[0]
    return node, tuple(reversed(path))


def following_views(node: Node, also: Callable[[Node], bool] = lambda node: False) -> tuple[Node, ...]:
    """The views that come after `node`, as long as each is the only user of the one before; and what else is passed."""
    path: list[Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if not (is_view(user) or also(user)):
            break
        path.append(user)
        node = user
    while path and not is_tensor(path[-1]):
        path.pop()  # a split, of which nothing takes the one part
    return tuple(path)


def outside_users(nodes: Iterable[Node], outputs: Collection[Node]) -> list[tuple[Node, Node]]:
    """Pairs (node, user), in graph order, where a node of the set, none of `outputs`, is read by a node that is not in
    the set.  Who asks for a size does not read."""
    inside = set(nodes)
    pairs = [(n, user) for n in inside if n not in outputs for user in n.users if user not in inside]
    return sorted(pair for pair in pairs if not calls(pair[1], *META_ONLY))


def reading(node: Node, user: Node) -> str:
    """What a user that is not part of a fusion makes of a node, as the end of a sentence."""
    if user.op != "output":
        return f"is also read by {user.name} ({target_name(user)})"
    if _is_kept_for_backward(node, user):
        return "is kept for the backward pass (for inference, compile and call the model under torch.no_grad())"
    return "is returned too"


def _is_kept_for_backward(node: Node, output: Node) -> bool:
    """True where a graph returns `node` to its backward pass alone."""
    told, returned = output.meta.get("desc"), output.args[0]
    if not isinstance(told, (list, tuple)) or not isinstance(returned, (list, tuple)) or len(told) != len(returned):
        return False
    kinds = {type(what).__name__ for what, x in zip(told, returned, strict=True) if x is node}
    return kinds == {"SavedForBackwardsAOTOutput"}  # torch._functorch._aot_autograd.descriptors


def storage_root(node: Node) -> Node:
    """The node whose memory `node` may share: walks up through ops that can return a view."""
    while may_be_view(node):
        node = node.all_input_nodes[0]
    return node


def may_be_view(node: Node) -> bool:
    """True for an op whose result may share memory with its first input, and for one of several results."""
    if calls(node, *COPIES) or node.op != "call_function" or not node.all_input_nodes:
        return False
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return aliases or node.target is operator.getitem or is_view(node)


def mutated_nodes(node: Node) -> Iterator[Node]:
    """The inputs that `node` writes to.  A higher-order op has no schema; in these graphs those are functional,
    but for the ones that say "mutation" in their name, which may write to any input."""
    if node.op != "call_function" or not _writes(node.target):
        return
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        yield from node.all_input_nodes
        return
    for position, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            written = argument(node, position, arg.name)
            for item in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(item, Node):
                    yield item


@functools.cache
def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = getattr(target, "__name__", str(target))
    return "mutation" in name and "functional" not in name


def source_line(node: Node) -> str:
    """Where the user's code made this node, as `file:line: code`, or "" where the graph does not say.

    The innermost frame that is not in this package's own layers: who calls `FP8Linear` wants to see the call.
    """
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    innermost = ""
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File "):
            file, _, rest = lines[i].removeprefix('File "').partition('", line ')
            number = rest.split(",")[0]
            code = lines[i + 1] if i + 1 < len(lines) and not lines[i + 1].startswith("File ") else ""
            told = f"{file}:{number}: {code}".rstrip(": ")
            if not file.startswith(_OWN_LAYERS):
                return told
            innermost = innermost or told
    return innermost


def place(node: Node) -> str:
    """Where a reader of a report finds `node`: the module that it runs in, then the source line; its name without both.

    The line alone does not tell layers apart: transformers has one call of SDPA for all models.
    """
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"^L\['(\w+)'\]\.?", "", str(modules[-1][0])) if modules else ""
    path = path.removeprefix("_modules.").replace("['", "").replace("']", "")
    return ", ".join(part for part in (path, source_line(node)) if part) or node.name


def find_calls(graph: Graph, targets: Iterable[object]) -> list[Node]:
    """All calls of `targets`, in graph order."""
    wanted = set(targets)
    return [n for n in graph.nodes if n.op == "call_function" and n.target in wanted]
