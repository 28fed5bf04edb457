"""A fusion written as two plain functions.

`search` is traced as Inductor would (`tracing`), and looked for in two steps.  Coarse: the ops of the trace, joined in
the same way; the numbers among their arguments are not looked at, nor is a `reshape` that only one side has.  That
says what the parameters are.  Exact: `search` is traced again on these very tensors and numbers, and the graph must
have every op and every argument of that trace.  So a size, or what Inductor makes of a dtype, need not be that of the
examples, and nothing that differs from `search` is taken for it: no keyword argument that the examples left at its
default, no other constant, no number that happens to equal a size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from fusion_passes.fusions.rule import Rule
from fusion_passes.fusions.traced.search import Binding, Comparison, Pattern, show, through_reshapes, trace_examples
from fusion_passes.fusions.traced.tracing import trace
from fusion_passes.graph.match import Call, DeclinedError, Match
from fusion_passes.graph.read import is_tensor, value
from fusion_passes.idioms import Idioms, NearMiss
from fusion_passes.quant import dtype_name

HALVES = (torch.bfloat16, torch.float16)
"""What stands for each other: Inductor decomposes both in the same way."""

SMALLEST_NEAR_MISS = 3
"""Ops of a pattern from which on a place that differs in an argument is worth a line: less is everywhere."""


@dataclass(frozen=True, eq=False)
class TracedMatch(Match):
    """`arguments`: what the parameters of `search` are in the graph, in their order: nodes, or numbers."""

    arguments: dict[str, Any]
    traces: dict[object, GraphModule] = field(repr=False)
    """What was traced for the matches of this graph."""


@dataclass(frozen=True, kw_only=True)
class TracedRule(Rule[TracedMatch]):
    """Find what `search` computes, put what `replace` computes.

    Both take the same parameters and return one new tensor.  `example_inputs` has a tensor (on the meta or any device)
    or a Python number for each:

    - A tensor stands for tensors of its dtype; bf16 and fp16 are found by one rule, fp32 needs a rule of its own.
      Sizes, strides, and leading dimensions that `search` flattens are not looked at.
    - A number, such as an epsilon, stands for whatever number the graph has there; `replace` gets that one.  `search`
      must hand it to an op as it is.

    `replace` may make tensors and call ops that write to them (an op with an `out` argument): it is functionalised, and
    Inductor writes in place.

    Override `legality` (and call `super().legality(m)`) or `profitability` to decline matches.

    Raises ValueError at construction, with what to write instead, if `search` or `replace` cannot be traced on the
    examples, does not return one new tensor, writes to a parameter or uses a tensor that is none, if they give
    different shapes or dtypes, or if `search` ignores a parameter or computes with a number.
    """

    # Of the class in other rules; here each instance is a rule.
    name: str  # type: ignore[misc]
    search: Callable[..., Tensor]
    replace: Callable[..., Tensor]
    example_inputs: tuple[Any, ...] = field(repr=False)
    summary: str = ""  # type: ignore[misc]

    def __post_init__(self) -> None:
        try:
            self._check_parameters()
            missing = {**self._examples}.keys() - self._pattern.found
            if missing:
                raise DeclinedError(f"search ignores {sorted(missing)}, so it could never be told what they are")
            self._check_results()
        except DeclinedError as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _check_parameters(self) -> None:
        examples: object = self.example_inputs
        if not isinstance(examples, (tuple, list)):
            kind = type(examples).__name__
            raise DeclinedError(f"example_inputs must be a tuple with one example for each parameter, got a {kind}")
        for role, fn in (("search", self.search), ("replace", self.replace)):
            if not callable(fn):
                raise DeclinedError(f"{role} must be a function, got {fn!r}")
            kinds = {p.kind for p in inspect.signature(fn).parameters.values()}
            if not kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
                raise DeclinedError(f"{role} must name its parameters, without * and **")
        parameters = list(inspect.signature(self.search).parameters)
        if parameters != list(inspect.signature(self.replace).parameters):
            raise DeclinedError(f"search and replace must take the same parameters, {parameters}")
        if len(parameters) != len(self.example_inputs):
            raise DeclinedError(f"search takes {parameters}, got {len(self.example_inputs)} example inputs")
        for name, example in zip(parameters, self.example_inputs, strict=True):
            finite = isinstance(example, (int, float)) and math.isfinite(example)
            if not finite and not isinstance(example, Tensor):
                raise DeclinedError(f"the example of {name} must be a tensor or a finite number, got {example!r}")

    def _check_results(self) -> None:
        search, replace = (
            value(traced.graph.output_node().all_input_nodes[0]) for traced in (self.traced_search, self.traced_replace)
        )
        if (search.dtype, search.device) != (replace.dtype, replace.device) or search.shape != replace.shape:
            gives = "{} gives {} {} on {}"
            a, b = (
                gives.format(role, dtype_name(x.dtype), list(x.shape), x.device)
                for role, x in (("search", search), ("replace", replace))
            )
            raise DeclinedError(f"on the example inputs {a}, {b}: they must give the same")

    @property
    def _examples(self) -> dict[str, Any]:
        return dict(zip(inspect.signature(self.search).parameters, self.example_inputs, strict=True))

    @property
    def traced_search(self) -> GraphModule:
        """`search` on the examples, as a post-grad graph."""
        return self._pattern.traced

    @cached_property
    def traced_replace(self) -> GraphModule:
        """`replace` on the examples, as a post-grad graph."""
        return trace_examples("replace", self.replace, self._examples)

    def _cache_state(self) -> dict[str, object]:
        """The examples by what a trace sees of them: what is in them is not looked at, and mostly left uninitialised.
        The pattern, since what `search` reads may have changed since it was made."""
        examples = [
            (tuple(x.shape), x.stride(), x.dtype, str(x.device)) if isinstance(x, Tensor) else x
            for x in self.example_inputs
        ]
        return super()._cache_state() | {"example_inputs": examples, "pattern": self.traced_search}

    def _cache_products(self) -> list[object]:
        """The graphs of both functions: also what they read where nobody can follow, such as files, is seen there."""
        products: list[object] = []
        for role, fn in (("search", self.search), ("replace", self.replace)):
            try:
                products.append(trace_examples(role, fn, self._examples))
            except Exception as error:  # it may take the tensors of a match, though
                products.append(type(error).__name__)
        return products

    @cached_property
    def _pattern(self) -> Pattern:
        return Pattern.of(self.search, self._examples)

    @cached_property
    def _patterns(self) -> tuple[Pattern, ...]:
        """That of the examples, then those of the other floating-point dtypes: fp16 for bf16 is a place like any other,
        fp32 one to tell about."""
        dtypes = {x.dtype for x in self._examples.values() if isinstance(x, Tensor)}
        swaps: list[dict[torch.dtype, torch.dtype]] = []
        if dtypes & {*HALVES}:
            swaps += [dict(zip(HALVES, reversed(HALVES), strict=True)), dict.fromkeys(HALVES, torch.float32)]
        elif torch.float32 in dtypes:
            swaps.append({torch.float32: torch.bfloat16})
        found = [self._pattern]
        for swap in swaps:
            try:
                found.append(Pattern.of(self.search, {name: _cast(x, swap) for name, x in self._examples.items()}))
            except DeclinedError:
                continue  # search does not take this dtype, so no graph has it
        return tuple(found)

    def pattern(self, idioms: Idioms) -> Iterator[TracedMatch]:
        """Every place that computes `search`, and those that only lack the right kind of parameters."""
        return (found for found in self._find(idioms.graph) if isinstance(found, TracedMatch))

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Places that have the ops of `search` with other arguments."""
        return (found for found in self._find(idioms.graph) if isinstance(found, NearMiss))

    def _find(self, graph: Graph) -> Iterator[TracedMatch | NearMiss]:
        traces: dict[object, GraphModule] = {}
        targets = {pattern.root.target for pattern in self._patterns}
        for root in graph.nodes:
            if root.op != "call_function" or through_reshapes(root).target not in targets:
                continue
            bindings = (pattern.bind(root) for pattern in self._patterns)
            if (binding := next((b for b in bindings if b is not None), None)) is not None:
                found = self._judge(root, binding, traces)
                if found is not None:
                    yield found

    def _judge(self, root: Node, binding: Binding, traces: dict[object, GraphModule]) -> TracedMatch | NearMiss | None:
        arguments = {name: binding.arguments[name] for name in self._examples}
        inputs = tuple(dict.fromkeys(x for x in arguments.values() if isinstance(x, Node)))
        if self._other_kind(arguments) is not None:  # search cannot be traced on these
            return TracedMatch(root, frozenset(binding.nodes), inputs, arguments, traces)
        try:
            exact = Comparison(self._trace("search", arguments, traces), arguments)
        except DeclinedError as error:
            why = str(error)
        except Exception as error:
            why = (
                f"search cannot be traced on these tensors: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            )
        else:
            why = exact.differs(exact.root, root)
            if not why:
                return TracedMatch(root, frozenset(exact.nodes), inputs, arguments, traces)
            if not exact.gives_shape_of(root):
                return None
        return NearMiss(root, self.name, why) if len(binding.nodes) >= SMALLEST_NEAR_MISS else None

    def _other_kind(self, arguments: Mapping[str, Any]) -> str | None:
        """Which parameter is a number here and a tensor in the examples, or the other way round."""
        for name, example in self._examples.items():
            found = arguments[name]
            if isinstance(example, Tensor) and not is_tensor(found):
                return f"{name} is {show(found)} here, not a tensor"
            if not isinstance(example, Tensor) and isinstance(found, Node):
                kind = "a tensor" if is_tensor(found) else "a symbolic size"
                return f"{name} is {kind} here, {found.name}, and a number in example_inputs"
        return None

    def _other_type(self, arguments: Mapping[str, Any]) -> str | None:
        """Which parameter has another type than its example."""
        for name, example in self._examples.items():
            found = arguments[name]
            if not isinstance(example, Tensor):
                if not _fits(found, example):
                    return f"{name} is {found!r} here, and {example!r} in example_inputs: another type"
                continue
            dtype = value(found).dtype
            if dtype != example.dtype and not {dtype, example.dtype} <= {*HALVES}:
                return (
                    f"{name} is {dtype_name(dtype)} here and {dtype_name(example.dtype)} in example_inputs: "
                    "make a rule with such examples"
                )
        return None

    def _trace(self, role: str, arguments: Mapping[str, Any], traces: dict[object, GraphModule]) -> GraphModule:
        """`search` or `replace` on the values of these nodes and numbers; once for all places of a graph that are
        alike."""
        given = {name: value(x) if isinstance(x, Node) else x for name, x in arguments.items()}
        key = (role, *(_signature(x) for x in given.values()))
        if key not in traces:
            traces[key] = trace(role, getattr(self, role), given, _fake_mode(given.values()))
        return traces[key]

    def legality(self, m: TracedMatch) -> None:
        """Every parameter must be what its example is: a tensor of its dtype, or a number."""
        if why := self._other_kind(m.arguments) or self._other_type(m.arguments):
            raise DeclinedError(why)

    def replacement(self, m: TracedMatch, call: Call) -> Node:
        """Trace `replace` on the tensors and numbers of this match and copy its nodes."""
        traced = self._trace("replace", m.arguments, m.traces)
        tensors = (x for x in m.arguments.values() if isinstance(x, Node))
        copies: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True))
        with _fake_mode(x.meta["val"] for x in m.inputs):  # for what is made of nothing but sizes
            for node in (n for n in traced.graph.nodes if n.op == "call_function"):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = call(node.target, *args, **kwargs)
        (result,) = traced.graph.output_node().all_input_nodes
        replaced: Node = copies[result]
        return replaced

    def describe(self, m: TracedMatch) -> str:
        """Shapes and dtypes of the tensors, and the numbers."""
        parts = []
        for name, x in m.arguments.items():
            if is_tensor(x):
                parts.append(f"{name} {dtype_name(value(x).dtype)} {list(value(x).shape)}")
            elif not isinstance(x, Node):
                parts.append(f"{name} {x!r}")
        return ", ".join(parts)


def _fake_mode(values: Iterable[Any]) -> FakeTensorMode:
    """That of a graph's values."""
    mode: FakeTensorMode | None = detect_fake_mode([x for x in values if isinstance(x, Tensor)])
    if mode is None:
        raise DeclinedError("this graph carries no fake tensors, so shapes cannot be checked")
    return mode


def _fits(found: object, example: object) -> bool:
    """True where a number of the graph may stand for the example: an int for a float too."""
    if isinstance(example, float):
        return isinstance(found, (int, float)) and not isinstance(found, bool)
    return type(found) is type(example)


def _signature(x: Any) -> object:
    if isinstance(x, Tensor):
        return str(tuple(x.shape)), str(x.stride()), x.dtype, x.device
    return type(x), repr(x)


def _cast(x: Any, swap: Mapping[torch.dtype, torch.dtype]) -> Any:
    """The example in another dtype, without values."""
    if not isinstance(x, Tensor) or x.dtype not in swap:
        return x
    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.stride(), dtype=swap[x.dtype], device=x.device)
