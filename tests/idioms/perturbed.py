"""Every attribute of every op, changed: what a reader then still reads must be what the graph computes.

A program is a captured graph that runs on the CPU, with the values of all nodes beside it.  `perturbations` yields
copies of it with one thing changed: another dimension, `keepdim` the other way round, `alpha=2`, operands swapped or
broadcast along another axis, another constant, another dtype, a neighbouring op.  `wrong` says which idioms of such a
copy do not compute what its graph computes; that nothing is recognised is fine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fusion_passes.idioms import Idiom, recognize
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.rms_norm import RMSNorm
from fusion_passes.idioms.rope import Rope
from fusion_passes.quant import codes
from fusion_passes.testing import INPUTS, _OnCPU

aten, prims = torch.ops.aten, torch.ops.prims
CAST = prims.convert_element_type.default
FP8 = torch.float8_e4m3fn

NEIGHBOURS = (
    (aten.le, aten.lt, aten.ge, aten.gt, aten.eq, aten.ne),
    (aten.add, aten.sub),
    (aten.mul, aten.div),
    (aten.minimum, aten.maximum),
    (aten.clamp_min, aten.clamp_max),
    (aten.amax, aten.amin),
    (aten.any, aten.all),
    (aten.logical_and, aten.logical_or, aten.bitwise_and, aten.bitwise_or),
    (aten.round, aten.floor),
    (aten.max, aten.min),
    (aten.reciprocal, aten.neg, aten.abs, aten.exp, aten.logical_not, aten.rsqrt, aten.sqrt),
    (aten.mean, aten.sum),
)
"""Ops with the same arguments and another result."""

OTHER_OVERLOADS: dict[Any, tuple[Any, dict[str, Any]]] = {
    aten.div.Tensor: (aten.div.Tensor_mode, {"rounding_mode": "floor"}),
    aten.round.default: (aten.round.decimals, {"decimals": -1}),
}
"""The same op with an argument more."""

Change = Callable[[Graph, Node], None]

_run = _OnCPU(GraphModule({}, Graph())).call_function
"""One op on CPU tensors."""


class Program:
    """A graph and the values of its nodes, which stand on the nodes as their meta values too."""

    def __init__(self, graph: Graph, inputs: tuple[Any, ...], known: dict[Node, Any] | None = None) -> None:
        self.graph = graph
        self.inputs = inputs
        self.values: dict[Node, Any] = dict(known or {})

    @staticmethod
    def captured(graph: Graph) -> Program:
        """From `testing.capture` or `capture_cuda`."""
        assert graph.owning_module is not None
        program = Program(graph, graph.owning_module.meta[INPUTS])
        program.evaluate()
        return program

    def changed(self, node: Node, change: Change) -> tuple[Program, Node]:
        """A copy in which `change` was applied to `node`, with the values before that; and its node for `node`."""
        graph, nodes = Graph(), dict[Node, Node]()
        graph.output(graph.graph_copy(self.graph, nodes))
        known = {nodes[n]: v for n, v in self.values.items() if n < node}
        change(graph, nodes[node])
        return Program(graph, self.inputs, known), nodes[node]

    def evaluate(self, last: Node | None = None) -> None:
        """Compute the values that are not known, up to `last`.  Raises what an op raises."""
        given = iter(self.inputs)
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    self.values[node] = next(given)
                elif node.op == "call_function" and node not in self.values:
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
                    _check_attention(node, args)
                    self.values[node] = _run(node.target, args, kwargs)
                if node.op != "output":
                    node.meta = {**node.meta, "val": self.values[node]}
                if node is last:
                    return


def _check_attention(node: Node, args: tuple[Any, ...]) -> None:
    """The attention op for CPU trusts its caller: with other shapes and strides it reads elsewhere, or the process
    ends."""
    if "_scaled_dot_product" in str(node.target):
        q, k, v = args[:3]
        if any(x.ndim != 4 or x.stride(-1) != 1 for x in (q, k, v)) or k.shape[:3] != v.shape[:3]:
            raise ValueError("not what scaled_dot_product_attention gives to the op")
        if q.shape[1] % k.shape[1] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
            raise ValueError("no attention")


def path(program: Program) -> list[Node]:
    """The calls by which the outputs of the idioms are computed, in order."""
    found: set[Node] = set()
    work = [idiom.output for idiom in recognize(program.graph)]
    while work:
        node = work.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            work.extend(node.all_input_nodes)
    return sorted(found)


def perturbations(program: Program, nodes: list[Node]) -> Iterator[tuple[str, Callable[[], list[Program]]]]:
    """What is changed, in words, and the changed programs: several where the result's rank is made up for in several
    ways, none where it cannot be run."""
    for node in nodes:
        for what, change in itertools.chain(_attributes(node), _operators(node), _operands(node, program.values)):

            def made(node: Node = node, change: Change = change) -> list[Program]:
                return list(_fitted(program, node, change))

            yield f"{node.name} = {node.target}: {what}", made


def _fitted(program: Program, node: Node, change: Change) -> Iterator[Program]:
    copy, here = program.changed(node, change)
    try:
        copy.evaluate(here)
    except Exception:
        return
    before, after = program.values[node], copy.values[here]
    ways: list[tuple[Any, int] | None] = [None]
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.ndim > after.ndim:
            ways += [(aten.unsqueeze.default, dim) for dim in range(after.ndim + 1)]
        elif before.ndim < after.ndim:
            ways += [(aten.squeeze.dim, dim) for dim in range(after.ndim) if after.shape[dim] == 1]
    for way in ways:
        if way is not None:
            copy, here = program.changed(node, change)
            with copy.graph.inserting_after(here):
                made = copy.graph.call_function(way[0], (here, way[1]))
            here.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
        try:
            copy.evaluate()
        except Exception:
            continue
        yield copy


def _alternatives(kind: str, given: Any) -> list[Any]:
    """Other values of an argument, by its type in the schema."""
    if isinstance(given, bool) or (kind.startswith("bool") and given is None):
        return [not given]
    if isinstance(given, torch.dtype):
        return [x for x in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32) if x != given]
    if isinstance(given, (list, tuple)) and all(isinstance(x, int) for x in given):
        swapped = [[*given[:i], given[i + 1], given[i], *given[i + 2 :]] for i in range(len(given) - 1)]
        other = [[*given[:i], given[i] + by, *given[i + 1 :]] for i in range(len(given)) for by in (1, -1)]
        return [x for x in (*swapped, *other, []) if list(x) != list(given)]
    if isinstance(given, int):
        return [x for x in dict.fromkeys((given + 1, given - 1, -given, 0, 1, -1, 2, -2)) if x != given]
    if isinstance(given, float):
        return [x for x in (given * 2, -given, given + 1.0, 0.0, -1e4, math.inf) if x != given]
    if given is None and kind.startswith(("number", "Scalar", "float")):
        return [1.5]
    if given is None and kind.startswith(("int", "SymInt")) and "[" not in kind:
        return [0, 1, -1]
    return []


def _attributes(node: Node) -> Iterator[tuple[str, Change]]:
    """Each argument that is no tensor, also those left out."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        if len(node.args) == 2 and isinstance(node.args[1], int):
            for at in (node.args[1] + 1, 0, 1, 2, -1):
                if at != node.args[1]:
                    yield f"output {at}", _put(1, "", at)
        return
    for i, argument in enumerate(schema.arguments):
        positional = not argument.kwarg_only and i < len(node.args)
        given = node.args[i] if positional else node.kwargs.get(argument.name, argument.default_value)
        for other in _alternatives(str(argument.type), given):
            yield f"{argument.name}={other}", _put(i if positional else None, argument.name, other)


def _put(position: int | None, name: str, other: Any) -> Change:
    def change(graph: Graph, node: Node) -> None:
        if position is None:
            node.kwargs = {**node.kwargs, name: other}
        else:
            node.args = (*node.args[:position], other, *node.args[position + 1 :])

    return change


def _operators(node: Node) -> Iterator[tuple[str, Change]]:
    """Another op with the same arguments."""
    packet, overload = getattr(node.target, "overloadpacket", None), getattr(node.target, "_overloadname", "")
    for group in NEIGHBOURS:
        for other in group if packet in group else ():
            if other is not packet and hasattr(other, overload):
                yield f"becomes {other}", _retargeted(getattr(other, overload), {})
    if node.target in OTHER_OVERLOADS:
        target, kwargs = OTHER_OVERLOADS[node.target]
        yield f"becomes {target}", _retargeted(target, kwargs)


def _retargeted(target: Any, kwargs: dict[str, Any]) -> Change:
    def change(graph: Graph, node: Node) -> None:
        node.target = target
        node.kwargs = {**node.kwargs, **kwargs}

    return change


def _operands(node: Node, values: dict[Node, Any]) -> Iterator[tuple[str, Change]]:
    """Tensors swapped, or one of them in another shape, order, dtype, or with another sign."""
    tensors = [i for i, arg in enumerate(node.args) if isinstance(arg, Node) and isinstance(values[arg], Tensor)]
    for a, b in itertools.combinations(range(min(2, len(node.args))), 2):
        if a in tensors or b in tensors:
            yield f"arguments {a} and {b} swapped", _swapped(a, b)
    if node.args and isinstance(node.args[0], (list, tuple)) and len(node.args[0]) > 1:
        yield "the parts in the other order", _put(0, "", list(reversed(node.args[0])))
    for i in tensors:
        arg = node.args[i]
        assert isinstance(arg, Node)
        for what, steps in _reshaped(values[arg]):
            yield f"argument {i} {what}", _through(i, steps)


Step = tuple[Any, tuple[Any, ...]]


def _reshaped(x: Tensor) -> Iterator[tuple[str, list[Step]]]:
    """Steps that make another tensor of one."""
    rank = range(x.ndim)
    for dim in range(x.ndim + 1):
        yield f"unsqueezed at {dim}", [(aten.unsqueeze.default, (dim,))]
    for dim in rank:
        if x.shape[dim] == 1:
            yield f"squeezed at {dim}", [(aten.squeeze.dim, (dim,))]
            yield f"expanded at {dim}", [(aten.expand.default, ([4 if d == dim else -1 for d in rank],))]
        else:
            yield f"sliced at {dim}", [(aten.slice.Tensor, (dim, 0, 1))]
            yield f"selected at {dim}", [(aten.select.int, (dim, 0))]
            yield f"flipped at {dim}", [(aten.flip.default, ([dim],))]
    for a, b in itertools.combinations(rank, 2):
        yield f"transposed {a} and {b}", [(aten.transpose.int, (a, b))]
    if x.ndim > 1:
        yield (
            "in another order",
            [(aten.reshape.default, (list(reversed(x.shape)),)), (aten.reshape.default, (list(x.shape),))],
        )
        back = list(reversed(rank))
        yield "in the opposite order", [(aten.permute.default, (back,)), (aten.reshape.default, (list(x.shape),))]
    if x.dtype.is_floating_point and x.dtype.itemsize > 1:
        yield "negated", [(aten.neg.default, ())]
        for dtype in (torch.int32, FP8, torch.float16):
            yield f"as {dtype}", [(CAST, (dtype,))]
            yield f"rounded to {dtype}", [(CAST, (dtype,)), (CAST, (x.dtype,))]
    elif x.dtype is torch.bool:
        yield "negated", [(aten.logical_not.default, ())]


def _through(position: int, steps: list[Step]) -> Change:
    def change(graph: Graph, node: Node) -> None:
        x = node.args[position]
        with graph.inserting_before(node):
            for target, args in steps:
                x = graph.call_function(target, (x, *args))
        node.args = (*node.args[:position], x, *node.args[position + 1 :])

    return change


def _swapped(a: int, b: int) -> Change:
    def change(graph: Graph, node: Node) -> None:
        args = list(node.args)
        args[a], args[b] = args[b], args[a]
        node.args = tuple(args)

    return change


def judged(program: Program) -> tuple[int, list[str]]:
    """How many idioms are read in the graph, and those that do not compute what the graph computes, in words."""
    idioms = list(recognize(program.graph))
    return len(idioms), [f"{idiom}: {what}" for idiom in idioms if (what := _difference(program, idiom))]


def wrong(program: Program) -> list[str]:
    """The idioms that do not compute what the graph computes, in words."""
    return judged(program)[1]


def _difference(program: Program, idiom: Idiom) -> str:
    """How far an idiom's reference is from the graph; "" where it computes the same."""
    values = program.values
    got = values[idiom.output]
    if isinstance(idiom, Quantize):
        want = idiom.reference(*(values[x] for x in idiom.inputs))
        return _codes_differ(_behind(want, idiom.views, values), got)
    if isinstance(idiom, GroupQuantize):
        want, scales = idiom.reference(values[idiom.input])
        if idiom.scales is not None:
            held = values[idiom.scales].flatten().float()
            if held.shape != scales.shape or not torch.allclose(held, scales, rtol=1e-2, atol=0.0, equal_nan=True):
                return f"its scales are {held}, not {scales}"
        return _codes_differ(_behind(want, idiom.views, values), got)
    if isinstance(idiom, RMSNorm):
        want = idiom.reference(*(values[x] for x in idiom.inputs))
        if (want.dtype, want.shape) != (got.dtype, got.shape):
            return f"it is {want.dtype} {list(want.shape)}, not {got.dtype} {list(got.shape)}"
        ulp = torch.finfo(got.dtype).eps  # a sum in another order may round to the other side
        close = torch.isclose(want.float(), got.float(), rtol=max(1e-5, 1.01 * ulp), atol=1e-6, equal_nan=True)
        return "" if bool(close.all()) else f"off by {float((want - got).abs().max()):g}"
    if isinstance(idiom, (Attention, Rope)):
        if not all(bool(values[x].isfinite().all()) for x in idiom.inputs[:3]):
            return ""  # in what becomes of NaN and infinity, torch's own attention ops differ
        want = idiom.reference(*(values[x] for x in idiom.inputs)).float()
        if want.shape != got.shape:
            return f"its shape is {list(want.shape)}, not {list(got.shape)}"
        got = got.float()
        if isinstance(idiom, Attention):
            empty = (want == 0.0) | want.isnan()  # of a row that attends to nothing
            if not (torch.__version__ < "2.12" and idiom.backend == "cudnn"):  # which masks with a finite number there
                empty &= got.isnan()
            want, got = want.masked_fill(empty, 0.0), got.masked_fill(empty, 0.0)
        close = torch.isclose(want, got, rtol=0.05, atol=0.05, equal_nan=True)
        return "" if bool(close.all()) else f"off by {float((want - got).abs().max()):g}"
    return ""


def _behind(x: Tensor, views: tuple[Node, ...], values: dict[Node, Any]) -> Tensor:
    dtype = x.dtype
    made: Any = x.float()
    for view in views:
        args, kwargs = torch.fx.node.map_arg((view.args[1:], view.kwargs), values.__getitem__)
        made = view.target(made, *args, **kwargs)  # type: ignore[operator]
    return made.to(dtype)


def _codes_differ(want: Tensor, got: Tensor) -> str:
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        return f"it is {want.dtype} {list(want.shape)}, not {got.dtype} {list(got.shape)}"
    nans = want.float().isnan() & got.float().isnan()
    steps = (codes(want) - codes(got)).abs().masked_fill(nans, 0)
    return f"codes are up to {int(steps.max())} steps off" if steps.numel() and int(steps.max()) > 1 else ""
