"""Looking for a traced function in a graph: first the ops that are joined in the same way, then every argument.

`Pattern.bind` says what the parameters would be, whatever the numbers among the arguments; `Comparison` compares the
place with a trace on those very parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from fusion_passes.fusions.traced.tracing import trace
from fusion_passes.graph.match import DeclinedError
from fusion_passes.graph.read import RESHAPES, aten, is_tensor, same_shape, target_name, value
from fusion_passes.graph.symbolic import known
from fusion_passes.quant import dtype_name


@dataclass(frozen=True, eq=False)
class Binding:
    """What the parameters are at a place, and the nodes between."""

    arguments: dict[str, Any]
    nodes: set[Node]


@dataclass(frozen=True, eq=False)
class Pattern:
    """`search`, traced on examples.  numbers: the parameter whose number stands at a place among a node's arguments."""

    traced: GraphModule
    parameters: dict[Node, str]
    numbers: dict[tuple[Node, tuple[int, ...]], str]

    @classmethod
    def of(cls, search: Callable[..., Tensor], examples: Mapping[str, Any]) -> Pattern:
        """By a trace, and one more for each number, with another number: what is different then is where it stands.

        Raises DeclinedError where search cannot be traced or computes with a number."""
        traced = trace_examples("search", search, examples)
        tensors = [name for name, x in examples.items() if isinstance(x, Tensor)]
        numbers: dict[tuple[Node, tuple[int, ...]], str] = {}
        for name, x in examples.items():
            if not isinstance(x, Tensor):
                other = _another(x)
                varied = trace_examples("search", search, {**examples, name: other})
                numbers |= dict.fromkeys(_places_of(name, x, other, traced, varied), name)
        return cls(traced, dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True)), numbers)

    @property
    def root(self) -> Node:
        """What the result is, but for its shape."""
        return through_reshapes(self.traced.graph.output_node().all_input_nodes[0])

    @property
    def found(self) -> set[str]:
        """The parameters that `bind` can tell."""
        return {name for node, name in self.parameters.items() if node.users} | {*self.numbers.values()}

    def bind(self, root: Node) -> Binding | None:
        """What the parameters are, where the graph has the ops of this pattern at `root`, whatever their numbers."""
        binding = Binding({}, set())
        result = self.traced.graph.output_node().all_input_nodes[0]
        if self._binds(result, root, binding, set()) and binding.arguments.keys() == self.found:
            return binding
        return None

    def _binds(self, ours: Node, theirs: Any, binding: Binding, seen: set[tuple[Node, Node]]) -> bool:
        if ours in self.parameters:
            return _bound(binding, self.parameters[ours], theirs)
        if not isinstance(theirs, Node) or theirs.op != "call_function":
            return False
        if (ours, theirs) in seen:
            return True
        seen.add((ours, theirs))
        if ours.target is not theirs.target:
            if ours.target in RESHAPES:
                return self._binds(ours.all_input_nodes[0], theirs, binding, seen)
            if theirs.target in RESHAPES:
                binding.nodes.add(theirs)
                return self._binds(ours, theirs.all_input_nodes[0], binding, seen)
            return False
        binding.nodes.add(theirs)
        pairs = zip(enumerate(_arguments(ours)), _arguments(theirs), strict=False)
        return all(self._argument_binds(ours, (i,), mine, other, binding, seen) for (i, mine), other in pairs)

    def _argument_binds(
        self, node: Node, at: tuple[int, ...], ours: Any, theirs: Any, binding: Binding, seen: set[tuple[Node, Node]]
    ) -> bool:
        if isinstance(ours, Node):
            return self._binds(ours, theirs, binding, seen)
        if (node, at) in self.numbers:
            return _bound(binding, self.numbers[node, at], theirs)
        if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
            holds_tensors = any(is_tensor(x) for x in (*ours, *theirs))
            if holds_tensors and len(ours) != len(theirs):
                return False
            pairs = zip(enumerate(ours), theirs, strict=False)
            return all(self._argument_binds(node, (*at, i), mine, other, binding, seen) for (i, mine), other in pairs)
        return not is_tensor(theirs)


def _bound(binding: Binding, name: str, theirs: Any) -> bool:
    """Bind a parameter, or say whether it is the same as before."""
    if name in binding.arguments and not _same(binding.arguments[name], theirs):
        return False
    binding.arguments[name] = theirs
    return True


class Comparison:
    """A graph, node by node, with a trace of `search` on `arguments`.  nodes: the graph's, as far as they are alike."""

    def __init__(self, traced: GraphModule, arguments: Mapping[str, Any]) -> None:
        tensors = (x for x in arguments.values() if isinstance(x, Node))
        self.root = traced.graph.output_node().all_input_nodes[0]
        self.inputs = dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True))
        self.nodes: set[Node] = set()
        self._seen: set[tuple[Node, Node]] = set()

    def gives_shape_of(self, root: Node) -> bool:
        """Else the place is another node, behind or in front of a reshape."""
        return is_tensor(root) and same_shape(value(self.root).shape, value(root).shape)

    def differs(self, ours: Node, theirs: Any) -> str:
        """How they differ, or ""."""
        if isinstance(theirs, Node) and (ours.target in RESHAPES or theirs.target in RESHAPES):
            return self._reshaped_differ(ours, theirs)
        if ours in self.inputs:
            return "" if self.inputs[ours] is theirs else f"{show(theirs)} where search has {self.inputs[ours].name}"
        if not isinstance(theirs, Node) or (not is_tensor(theirs) and is_tensor(ours)):
            return f"{show(theirs)} where search has a tensor"
        if not is_tensor(ours) and isinstance(ours.meta.get("val"), torch.SymInt):
            return "" if _same(ours, theirs) else f"{show(theirs)} where search has {ours.meta['val']}"
        if ours.target is not theirs.target:
            return f"{target_name(theirs)} where search has {target_name(ours)}"
        if (ours, theirs) in self._seen:
            return ""
        if _is_random(ours) and any(mine is ours for mine, _ in self._seen):
            return f"{target_name(theirs)} draws random numbers twice"
        self._seen.add((ours, theirs))
        self.nodes.add(theirs)
        return self._values_differ(ours, theirs) or self._arguments_differ(ours, theirs)

    def _reshaped_differ(self, ours: Node, theirs: Node) -> str:
        """However many reshapes there are on each side: the same elements in the same shape are the same."""
        if why := self._values_differ(ours, theirs):
            return why
        while ours.target in RESHAPES:
            ours = ours.all_input_nodes[0]
        bound = {*self.inputs.values()}
        while theirs.target in RESHAPES and theirs not in bound:
            self.nodes.add(theirs)
            theirs = theirs.all_input_nodes[0]
        if theirs.target in RESHAPES:
            return "" if self.inputs.get(ours) is theirs else f"{show(theirs)} where search has {target_name(ours)}"
        return self.differs(ours, theirs)

    def _values_differ(self, ours: Node, theirs: Node) -> str:
        if not (is_tensor(ours) and is_tensor(theirs)):
            return ""
        mine, other = value(ours), value(theirs)
        if mine.dtype != other.dtype:
            return f"{target_name(theirs)} gives {dtype_name(other.dtype)} where search gives {dtype_name(mine.dtype)}"
        if not same_shape(mine.shape, other.shape):
            return f"{target_name(theirs)} gives {list(other.shape)} where search gives {list(mine.shape)}"
        return ""

    def _arguments_differ(self, ours: Node, theirs: Node) -> str:
        names = _argument_names(ours)
        mine, others = _arguments(ours), _arguments(theirs)
        if len(mine) != len(others):
            return f"{target_name(theirs)} has other arguments than in search"
        for name, a, b in zip(names, mine, others, strict=False):
            # It says nothing but the shape, which was compared.
            if ours.target is aten.expand.default and name == "size":
                continue
            if name == "pin_memory" or (name == "layout" and (a or torch.strided) == (b or torch.strided)):
                continue
            if why := self._argument_differs(a, b):
                return why if _holds_node(a) else f"{target_name(theirs)} has {name}={show(b)}, search {show(a)}"
        return ""

    def _argument_differs(self, a: Any, b: Any) -> str:
        if isinstance(a, Node):
            return self.differs(a, b) if is_tensor(a) or isinstance(b, Node) else self._constant_differs(a, b)
        if isinstance(a, (list, tuple)):
            if not isinstance(b, (list, tuple)) or len(a) != len(b):
                return f"{show(b)} where search has {show(a)}"
            return next((why for x, y in zip(a, b, strict=True) if (why := self._argument_differs(x, y))), "")
        return self._constant_differs(a, b)

    def _constant_differs(self, a: Any, b: Any) -> str:
        return "" if _same(a, b) else f"{show(b)} where search has {show(a)}"


def trace_examples(role: str, fn: Callable[..., Any], examples: Mapping[str, Any]) -> GraphModule:
    """Raises DeclinedError with what is wrong with the function, whatever it raised."""
    try:
        return trace(role, fn, examples, FakeTensorMode(allow_non_fake_inputs=True))
    except DeclinedError:
        raise
    except Exception as error:
        raise DeclinedError(
            f"{role} cannot be traced on the example inputs: {type(error).__name__}: {error}"
        ) from error


def _another(number: float) -> float:
    """A number of the same type, not far away."""
    if isinstance(number, bool):
        return not number
    if isinstance(number, int):
        return number + 1
    return number * 1.25 if number else 0.125


def _places_of(
    name: str, number: float, other: float, traced: GraphModule, varied: GraphModule
) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Where a number parameter stands: where a trace with `other` has that instead.

    Raises DeclinedError where the traces differ in anything else: then the number is not only handed to ops."""
    nodes, others = list(traced.graph.nodes), list(varied.graph.nodes)
    computes = f"search computes with {name} instead of handing it to an op as it is: close over a fixed number"
    if [(n.op, n.target) for n in nodes] != [(n.op, n.target) for n in others]:
        raise DeclinedError(computes)
    twins = dict(zip(nodes, others, strict=True))
    for node, twin in twins.items():
        if node.op != "call_function":
            continue
        mine, theirs = dict(_leaves(_arguments(node))), dict(_leaves(_arguments(twin)))
        if mine.keys() != theirs.keys():
            raise DeclinedError(computes)
        for at, leaf in mine.items():
            if twins[leaf] is theirs[at] if isinstance(leaf, Node) else _same(leaf, theirs[at]):
                continue
            if node.target in RESHAPES:
                raise DeclinedError(f"search uses {name} as a size, which is not looked at: close over a fixed number")
            if (leaf, theirs[at]) not in ((number, other), (_fp32(number), _fp32(other))):
                raise DeclinedError(computes + f", or make what it computes ({leaf!r} for {number!r}) the parameter")
            yield node, at


def _fp32(number: float) -> float:
    """As some ops round a number in their decomposition."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item() if isinstance(number, float) else number


def _leaves(arguments: Iterable[Any], at: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    for i, x in enumerate(arguments):
        if isinstance(x, (list, tuple)):
            yield from _leaves(x, (*at, i))
        else:
            yield (*at, i), x


def _arguments(node: Node) -> list[Any]:
    """All arguments of a call in the order of its schema, those that were left out by their defaults."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [*node.args, *(node.kwargs[name] for name in sorted(node.kwargs))]
    return [
        node.args[i]
        if i < len(node.args)
        else node.kwargs.get(a.name, a.default_value if a.has_default_value() else None)
        for i, a in enumerate(schema.arguments)
    ]


def _argument_names(node: Node) -> list[str]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [*(f"argument {i}" for i in range(len(node.args))), *sorted(node.kwargs)]
    return [a.name for a in schema.arguments]


def _same(a: Any, b: Any) -> bool:
    """True where two arguments that are no tensors are the same: numbers (0.0 is not -0.0), sizes for every value."""
    a, b = (x.meta.get("val", x) if isinstance(x, Node) and not is_tensor(x) else x for x in (a, b))
    if isinstance(a, (int, float, torch.SymInt)) and isinstance(b, (int, float, torch.SymInt)):
        if isinstance(a, float) and isinstance(b, float):
            return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (a != a and b != b)
        return known(a == b)
    if isinstance(a, torch.device) and isinstance(b, torch.device) and None in (a.index, b.index):
        return a.type == b.type
    return type(a) is type(b) and bool(a == b)


def through_reshapes(node: Node) -> Node:
    """Walk up past reshapes: the node whose elements these are."""
    while node.op == "call_function" and node.target in RESHAPES:
        node = node.all_input_nodes[0]
    return node


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _holds_node(x: Any) -> bool:
    return isinstance(x, Node) or (isinstance(x, (list, tuple)) and any(_holds_node(item) for item in x))


def show(x: Any) -> str:
    """An argument, for a sentence."""
    if isinstance(x, Node):
        return f"{x.name} ({target_name(x)})" if is_tensor(x) else str(x.meta.get("val", x.name))
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(show(item) for item in x) + "]"
    return dtype_name(x) if isinstance(x, torch.dtype) else repr(x)
