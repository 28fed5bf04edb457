"""A fusion written as two plain functions; the only user of Inductor's private pattern matcher.

`TracedRule` traces `search` as Inductor would, turns the trace into a pattern and looks for it.  What the matcher gets
wrong by itself is handled here: a trace says `view` and leaves in-place ops where post-grad graphs say `reshape` and
are functional; up to torch 2.14 keyword arguments that the pattern does not name are dropped in silence; a "tensor" of
the pattern can be bound to a Python number; being used elsewhere counts as a mismatch, where it is a fact to report.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._inductor import pattern_matcher as inductor_matcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx import GraphModule, Node

from fusion_passes.graph import aten, find_calls, is_tensor, target_name, value
from fusion_passes.idioms import Idioms
from fusion_passes.quant import dtype_name
from fusion_passes.rule import Call, DeclinedError, Match, Rule


@dataclass(frozen=True, eq=False)
class TracedMatch(Match):
    """`arguments`: what the parameters of `search` are in the graph: nodes, or numbers."""

    arguments: dict[str, Any]
    unnamed: tuple[str, ...]
    """Keyword arguments in the graph that the pattern does not speak of."""


@dataclass(frozen=True, kw_only=True)
class TracedRule(Rule[TracedMatch]):
    """Find what `search` computes, put what `replace` computes.

    Both take the same tensors and return one.  `example_inputs` are tensors (on the meta or any device) of the rank and
    dtype to look for: dtypes decide how Inductor decomposes `search`, so bf16 and fp16 are found by one trace and fp32
    needs a rule of its own; sizes are not looked at, except where `search` uses them.

    Override `legality` (and call `super().legality(m)`) or `profitability` to decline matches.

    Raises ValueError at construction if `search` cannot be traced, has several outputs, ignores an input, or does not
    match itself.
    """

    # Of the class in other rules; here each instance is a rule.
    name: str  # type: ignore[misc]
    search: Callable[..., Tensor]
    replace: Callable[..., Tensor]
    example_inputs: tuple[Tensor, ...] = field(repr=False)
    summary: str = ""  # type: ignore[misc]

    def __post_init__(self) -> None:
        parameters = list(inspect.signature(self.search).parameters)
        if parameters != list(inspect.signature(self.replace).parameters):
            raise ValueError(f"{self.name}: search and replace must take the same parameters, {parameters}")
        if len(parameters) != len(self.example_inputs):
            raise ValueError(f"{self.name}: search takes {parameters}, got {len(self.example_inputs)} example inputs")
        unused = set(parameters) - set(self._find(self._traced.graph)[0].arguments)
        if unused:
            raise ValueError(f"{self.name}: search ignores {sorted(unused)}, so it could never be told what they are")

    @cached_property
    def _traced(self) -> GraphModule:
        try:
            return self._on_examples(self.search)
        except Exception as error:
            raise ValueError(f"{self.name}: search cannot be traced: {error}") from error

    def _on_examples(self, fn: Callable[..., Any]) -> GraphModule:
        with FakeTensorMode():
            # New tensors: one example given twice must not become one parameter.
            inputs = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in self.example_inputs
            ]
            return _trace(fn, inputs)

    def _cache_state(self) -> dict[str, object]:
        """The examples by what a trace sees of them: what is in them is not looked at, and mostly left uninitialised.
        The pattern, since what `search` reads may have changed since it was made."""
        examples = [
            (tuple(x.shape), x.stride(), x.dtype, str(x.device)) if isinstance(x, Tensor) else x
            for x in self.example_inputs
        ]
        return super()._cache_state() | {"example_inputs": examples, "pattern": self._traced}

    def _cache_products(self) -> list[object]:
        """The graphs of both functions: also what they read where nobody can follow, such as files, is seen there."""
        products: list[object] = []
        for fn in (self.search, self.replace):
            try:
                products.append(self._on_examples(fn))
            except Exception as error:  # it may take the tensors of a match, though
                products.append(type(error).__name__)
        return products

    @cached_property
    def _pattern(self) -> Any:
        names = list(inspect.signature(self.search).parameters)
        pattern = inductor_matcher.fx_to_pattern(self._traced, argnames=names)
        if not isinstance(pattern, inductor_matcher.CallFunction):
            raise ValueError(f"{self.name}: search must compute exactly one tensor")
        _ignore_user_counts(pattern)
        return pattern

    def _find(self, graph: torch.fx.Graph) -> list[TracedMatch]:
        """All matches in a graph.  Raises ValueError if the pattern does not match the trace that it was made from."""
        found = []
        for root in find_calls(graph, self._pattern.fns):
            match = self._pattern.match(root)
            if match:
                nodes = frozenset(match.nodes)
                inputs = tuple(n for n in match.kwargs.values() if isinstance(n, Node))
                found.append(TracedMatch(root, nodes, inputs, dict(match.kwargs), tuple(_unnamed(match))))
        if not found and graph is self._traced.graph:
            raise ValueError(f"{self.name}: search does not match its own trace:\n{graph}")
        return found

    def pattern(self, idioms: Idioms) -> Iterator[TracedMatch]:
        """Every place that computes `search`."""
        return iter(self._find(idioms.graph))

    def legality(self, m: TracedMatch) -> None:
        """Every parameter must be a tensor, and every argument in the graph one that the pattern speaks of."""
        for name, argument in m.arguments.items():
            m.require(is_tensor(argument), f"{name} is {argument!r} here, not a tensor")
        m.require(not m.unnamed, f"the graph says more than the pattern: {', '.join(m.unnamed)}")

    def replacement(self, m: TracedMatch, call: Call) -> Node:
        """Trace `replace` on the tensors of this match and copy its nodes."""
        nodes = list(m.arguments.values())
        names = list(inspect.signature(self.replace).parameters)
        fake = [value(m.arguments[name]) for name in names]
        traced = _trace(self.replace, fake)
        copies: dict[Node, Any] = dict(
            zip(traced.graph.find_nodes(op="placeholder"), (m.arguments[n] for n in names), strict=True)
        )
        for node in traced.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = call(node.target, *args, **kwargs)
            elif node.op == "get_attr":
                raise DeclinedError(f"{self.name}: replace closes over a tensor; pass it as a parameter")
        (result,) = traced.graph.output_node().all_input_nodes
        if copies[result] in nodes:
            raise DeclinedError(f"{self.name}: replace returns one of its inputs")
        replaced: Node = copies[result]
        return replaced

    def describe(self, m: TracedMatch) -> str:
        """Shapes and dtypes of the inputs."""
        tensors = {name: value(n) for name, n in m.arguments.items() if is_tensor(n)}
        return ", ".join(f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in tensors.items())


def _trace(fn: Callable[..., Any], inputs: list[Tensor]) -> GraphModule:
    """The post-grad form of `fn`: decomposed as Inductor does, functional, with `reshape` for `view`."""
    functional = dispatch_functionalize(fn, mode=FunctionalTensorMode())
    traced = inductor_matcher.fwd_only(functional, inputs)
    for node in traced.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
    traced.recompile()
    return traced


def _ignore_user_counts(pattern: Any) -> None:
    """Let an interior node have other users: the manager reports them, with their names."""
    if isinstance(pattern, inductor_matcher.CallFunction):
        pattern.users = inductor_matcher.MULTIPLE
        for argument in pattern.flat_args_kwargs[0]:
            _ignore_user_counts(argument)


def _unnamed(match: Any) -> Iterator[str]:
    """Keyword arguments of matched nodes that the pattern does not name.  Remove with support for torch 2.14."""
    for expression, node in match.ctx.pattern_to_node.items():
        if isinstance(expression, inductor_matcher.CallFunction) and isinstance(node, Node):
            for name in set(node.kwargs) - set(expression.kwargs):
                yield f"{target_name(node)}({name}={node.kwargs[name]})"
