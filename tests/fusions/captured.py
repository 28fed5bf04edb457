"""The cases' graphs, captured once in a process and shared by its tests: each test gets a copy to rewrite and run.

Capturing is most of what such a test costs, and the graph of a case is the same for all of them.  Where Dynamo, guards
or what is compiled again matter, `without_code.WithoutCode` compiles the case anew.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.testing import INPUTS, capture, capture_cuda, run
from tests.fusions.case import Case
from tests.fusions.without_code import FUSE


@functools.cache
def _captured(case: Case, tokens: int) -> tuple[Graph, tuple[int, ...]]:
    """The graph, and for each of its placeholders which input of the case it is."""
    inputs = case.inputs(tokens, "cpu")
    torch.compiler.reset()
    with torch.no_grad():
        (graph,) = capture(case.fn, *inputs)
    places = [next(i for i, x in enumerate(inputs) if x is given) for given in graph.owning_module.meta[INPUTS]]
    return graph, tuple(places)


@functools.cache
def _captured_cuda(case: Case, backend: str) -> Graph | None:
    """None where the case cannot be captured with this backend."""
    try:
        with torch.no_grad():
            return capture_cuda(case.fn, *case.inputs(8, "cpu"), backend=backend)
    except ValueError as error:
        assert "backend" in str(error)  # noqa: PT017
        return None


def _copied(graph: Graph) -> Graph:
    original = graph.owning_module
    module = GraphModule(original, copy.deepcopy(graph))
    module.meta[INPUTS] = original.meta[INPUTS]
    return module.graph


def graph_of(case: Case, tokens: int = 7) -> Graph:
    """The post-grad graph of a case on the CPU."""
    return _copied(_captured(case, tokens)[0])


def cuda_graph_of(case: Case, backend: str) -> Graph | None:
    """The post-grad graph of a case on CUDA with 8 tokens; None where the backend does not take it."""
    graph = _captured_cuda(case, backend)
    return None if graph is None else _copied(graph)


def rewritten(case: Case, tokens: int, config: PassConfig = FUSE) -> tuple[Callable[..., list[Any]], Report]:
    """The case's graph as the passes leave it, to be called with inputs of that many tokens as often as wanted; and
    what was done.  Returns the tensors that the case returns, one behind the other."""
    _, places = _captured(case, tokens)
    graph, report = graph_of(case, tokens), Report()
    PostGradPassManager(config, report)(graph)

    def call(*inputs: Any) -> list[Any]:
        return torch.utils._pytree.tree_leaves(run(graph, *(inputs[i] for i in places)))

    return call, report
