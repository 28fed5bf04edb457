"""Stock against fused on post-grad graphs, without code generation: tens of milliseconds a program.

Beside the values it compares what cannot be seen in them: that nothing outside of the fused places has changed, node
for node, that no guard was added, and the strides that the graph promises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusion_passes import testing
from fusion_passes.compiler.config import PassConfig, Profitability
from fusion_passes.compiler.manager import PostGradPassManager
from fusion_passes.compiler.report import Report
from fusion_passes.fusions.rule import MatchStatus
from fusion_passes.graph.read import META_ONLY, aten, calls
from fusion_passes.idioms.attention_mask import CUDNN_MASKED
from fusion_passes.ops import support
from fusion_passes.quant import FP8_DTYPES
from fusion_passes.testing.fuzz.ideal import InFP32
from fusion_passes.testing.fuzz.oracle import (
    Fault,
    Near,
    NotTraced,
    check_aliases,
    check_all_near,
    check_form,
    check_same_bits,
    narrowest,
    same_strides,
)

BITWISE = frozenset({"query_quant"})
"""Rules whose nodes compute the same bits as those that they replace, where the graph is run op by op."""
LARGER = 3
"""How much larger a dynamic size is in the second run."""


def check_graph(
    function: Callable[..., Any],
    make_inputs: Callable[[int, int], tuple[Any, ...]],
    *,
    backend: str = "cpu",
    n: int = 8,
    dynamic: Sequence[tuple[str, int]] = (),
    in_place_writes: bool = True,
) -> Counter[str]:
    """Compare `function(*make_inputs(n, seed))` with and without the passes, as post-grad graphs; see `Program`.

    make_inputs: other seeds than 0 are asked for where a result seems too far from fp32; see `oracle`.
    Returns how often each rule was applied, and "moved" for writes that stay in place since reads were moved.
    Raises Fault, and NotTraced where stock has no graph: for CUDA without a card, not every op can be traced.
    """
    return Traced.of(function, make_inputs, backend=backend, n=n, dynamic=dynamic).check(in_place_writes)


@dataclass(frozen=True)
class Traced:
    """Stock's graph of a program, what makes its inputs, and for which sizes: two where one is dynamic."""

    graph: Graph
    make_inputs: Callable[[int, int], tuple[Any, ...]]
    sizes: tuple[int, ...]
    backend: str

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        make_inputs: Callable[[int, int], tuple[Any, ...]],
        *,
        backend: str = "cpu",
        n: int = 8,
        dynamic: Sequence[tuple[str, int]] = (),
    ) -> Traced:
        """Raises NotTraced."""
        graph = _traced(function, make_inputs(n, 0), backend, dynamic)
        sizes = (n, n + LARGER) if dynamic and _fits(graph, function, make_inputs, n + LARGER) else (n,)
        return cls(graph, make_inputs, sizes, backend)

    def check(self, in_place_writes: bool = True) -> Counter[str]:
        """See `check_graph`."""
        fused, report = testing._copy(self.graph), Report()
        _rewrite(fused, report, in_place_writes)
        _check_nodes(self.graph, fused, report)
        applied = Counter(site.rule for site in report.sites if site.status is MatchStatus.FUSED)
        moved = len(report.moves)
        if applied or moved:
            stock, exact = testing._copy(self.graph), applied.keys() <= BITWISE
            fills = _cudnn_fills(stock)
            for graph in (stock, fused):
                _fill_with_infinity(graph, fills)
            for n in self.sizes:
                strides = self.backend == "cpu" and n == self.sizes[0]
                self._check_values(stock, fused, n, exact=exact, strides=strides)
        return applied + Counter(moved=moved)

    def _check_values(self, stock: Graph, fused: Graph, n: int, *, exact: bool, strides: bool) -> None:
        def results(seeds: Sequence[int]) -> Iterator[list[Near]]:
            for seed in seeds:
                inputs = self.make_inputs(n, seed)
                yield list(_compared(stock, fused, inputs, exact=exact, strides=strides))

        check_all_near(results)


def _traced(
    function: Callable[..., Any], inputs: tuple[Any, ...], backend: str, dynamic: Sequence[tuple[str, int]]
) -> Graph:
    names = function.__code__.co_varnames
    marked = [(inputs[names.index(name)], dim) for name, dim in dynamic]
    try:
        if backend == "cpu":
            return testing.capture_traced(function, *inputs, mark_dynamic=marked)
        return testing.capture_cuda(function, *inputs, backend=backend, mark_dynamic=marked)
    except Exception as error:
        raise NotTraced(f"{backend}: {type(error).__name__}: {error}") from error


@contextmanager
def _as_on_a_card() -> Iterator[None]:
    """What the rules ask of the machine, answered for CUDA tensors as by an H200: the graph is CUDA's, the card is not
    there."""
    capability = mock.patch.object(
        support, "device_capability", lambda device: (9, 0) if device.type == "cuda" else None
    )
    with capability, mock.patch.object(support, "triton_version", return_value=(3, 6)):
        yield


def _rewrite(graph: Graph, report: Report, in_place_writes: bool) -> None:
    """Run the passes, as Inductor does; a rule must not fail, and no guard may come of it."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph.find_nodes(op="placeholder")])
    guards = len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0
    try:
        with _as_on_a_card():
            PostGradPassManager(
                PassConfig(profitability=Profitability.IGNORE, in_place_writes=in_place_writes), report
            )(graph)
        graph.lint()
    except Exception as error:
        raise Fault("the passes failed", f"{type(error).__name__}: {error}") from error
    for site in report.sites:
        if site.reason.startswith("the rule failed"):
            raise Fault("a rule failed", f"{site.rule}: {site.reason}")
    for miss in (miss for graph in report.graphs for miss in graph.misses):
        if miss.reason.startswith("could not be read"):
            raise Fault("a reader failed", f"{miss.what}: {miss.reason}")
    if mode is not None and mode.shape_env is not None and len(mode.shape_env.guards) > guards:
        added = [str(guard.expr) for guard in mode.shape_env.guards[guards:]]
        raise Fault("a guard", f"the passes added {', '.join(added)}")


def _check_nodes(stock: Graph, fused: Graph, report: Report) -> None:
    """What was not fused is the same, node for node, and the results have the form that they had."""
    if not report.count() and not report.moves:
        if testing.print_graph(stock) != testing.print_graph(fused):
            raise Fault("another graph", "nothing was fused, and the graph is another one")
        return
    if (before := _cost(stock)) < (after := _cost(fused)):
        raise Fault("computed twice", f"attentions and writes count {before:g}, with the fused ones {after:g}")
    old = {node.name: node for node in stock.nodes}
    kept = {node: old[node.name] for node in fused.nodes if _is_same_call(node, old.get(node.name))}
    for node, before in kept.items():
        if calls(node, *META_ONLY):
            continue  # a size may be asked of another tensor that has it
        for x, y in zip(_leaves(node), _leaves(before), strict=True):
            if isinstance(x, Node) and isinstance(y, Node):
                if x in kept and kept[x] is not y:
                    raise Fault("another graph", f"{node.name} reads {x.name} where it read {y.name}")
            elif type(x) is not type(y) or x != y:
                raise Fault("another graph", f"{node.name} is called with {x}, not with {y}")
    for before, after in zip(_results(stock), _results(fused), strict=True):
        x, y = (node.meta.get("val") if isinstance(node, Node) else node for node in (before, after))
        if isinstance(x, Tensor) and not _has_form(x, y):
            raise Fault("another form", f"result {before}: {_form(x)}, fused {after}: {_form(y)}")


COSTS = {"bmm": 0.5, "mm": 0.5, "attention_quant": 1.0, "kv_cache_write": 1.0, "rope_quant_kv_write": 1.0}


def _cost(graph: Graph) -> float:
    """How many attentions and cache writes a graph computes: what is fused must not be computed twice."""
    names = [str(node.args[0] if "auto_functionalized" in str(node.target) else node.target) for node in graph.nodes]
    costs = (COSTS.get(name.split(".")[1] if "." in name else name, 0.0) for name in names)
    return sum(costs) + sum("dot_product" in name or "paged_attention" in name for name in names)


def _has_form(x: Tensor, y: Any) -> bool:
    """True where y has x's dtype, shape and strides; as texts, since a comparison of symbolic sizes adds a guard."""
    if not (isinstance(y, Tensor) and x.dtype == y.dtype and str(x.shape) == str(y.shape)):
        return False
    return str(x.stride()) == str(y.stride()) or same_strides(x.shape, x.stride(), y.stride())


def _form(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}" if isinstance(x, Tensor) else str(x)


def _is_same_call(node: Node, before: Node | None) -> bool:
    return before is not None and node.op == before.op and node.target == before.target


def _leaves(node: Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs), is_leaf=lambda x: isinstance(x, Node))


def _results(graph: Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _fits(
    stock: Graph, function: Callable[..., Any], make_inputs: Callable[[int, int], tuple[Any, ...]], n: int
) -> bool:
    """True where the graph is that of the program for another size too."""
    try:
        found = testing.run(stock, *make_inputs(n, 0))
        expected = function(*make_inputs(n, 0))
    except Exception:
        return False  # a size was fixed while tracing
    tensors = [x for x in pytree.tree_leaves(expected) if isinstance(x, Tensor)]
    return all(x.shape == y.shape for x, y in zip(found, tensors, strict=True))


def _compared(stock: Graph, fused: Graph, inputs: tuple[Any, ...], *, exact: bool, strides: bool) -> Iterator[Near]:
    """Run both graphs: raises where what must be equal is not; the results that need not be."""
    given = [[x.clone() if isinstance(x, Tensor) and 0 not in x.stride() else x for x in inputs] for _ in range(2)]
    outputs = [list(testing.run(graph, *values)) for graph, values in zip((stock, fused), given, strict=True)]
    for name, values in zip(("stock", "fused"), given, strict=True):
        for x, y in zip(inputs, values, strict=True):
            if isinstance(x, Tensor) and not torch.equal(_bits(x), _bits(y)):
                raise Fault("a write", f"the {name} graph writes to an input, which it must not")
    check_aliases((outputs[0], outputs[1]), (given[0], given[1]))
    changed = _changed(stock, fused)
    ideal: list[Any] | None = None
    for i, (node, x, y) in enumerate(zip(_results(fused), *outputs, strict=True)):
        name = f"result {i}"
        if not isinstance(x, Tensor) or exact or node not in changed:
            check_same_bits(name, x, y)
            continue
        check_form(name, x, y, strides=strides)
        ideal = _in_fp32(stock, inputs) if ideal is None else ideal
        yield Near(name, x, y, ideal[i], narrowest(inputs))


def _cudnn_fills(graph: Graph) -> set[str]:
    """The names of constants that mask scores for cuDNN up to torch 2.11, in place of -inf."""
    attentions = graph.find_nodes(op="call_function", target=aten._scaled_dot_product_cudnn_attention.default)
    masks = [node.args[3] for node in attentions]
    seen = {mask for mask in masks if isinstance(mask, Node)}
    waiting = list(seen)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - seen
        seen |= new
        waiting += new
    return {node.name for node in seen if calls(node, aten.full.default) and node.args[1] in CUDNN_MASKED}


def _fill_with_infinity(graph: Graph, fills: set[str]) -> None:
    """Mask with -inf, as later torch does: a row that attends to nothing is the mean of all values without, and 0 with
    a fusion, which is documented in fusions.md.  No other row changes."""
    for node in graph.nodes:
        if node.name in fills and calls(node, aten.full.default):
            node.update_arg(1, -math.inf)


def _in_fp32(stock: Graph, inputs: tuple[Any, ...]) -> list[Any]:
    with InFP32() as mode:
        return [mode.of(x) for x in testing.run(stock, *inputs)]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in FP8_DTYPES else x.nan_to_num() if x.dtype.is_floating_point else x


def _changed(stock: Graph, fused: Graph) -> set[Node]:
    """The new nodes of a graph, and all that is computed from them."""
    old = {node.name: node for node in stock.nodes}
    found: set[Node] = set()
    for node in fused.nodes:
        if not _is_same_call(node, old.get(node.name)) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
