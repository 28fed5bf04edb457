"""Steps: what one node makes of one tensor, whichever op says it.

Idioms that are chains of steps are grammars over this alphabet: a cast stays a cast whether `to`, `float` or `_to_copy`
wrote it, a clamp stays a clamp as `clamp`, `clamp_max`, `hardtanh` or `minimum`, with bounds that are numbers or
tensors filled with one.  A step is read with all of its arguments, or it is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Node

from fusion_passes.graph.arguments import arguments, number, operands, tensor_node
from fusion_passes.graph.read import (
    CASTS,
    aten,
    calls,
    has_one_element,
    is_noop,
    is_tensor,
    is_view,
    keeps_order,
    same_shape,
    value,
)

MULTIPLICATIONS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVISIONS = frozenset({aten.div.Tensor, aten.div.Scalar})

CLAMPS: dict[object, tuple[str | None, str | None]] = {
    aten.clamp.default: ("min", "max"),
    aten.clamp.Tensor: ("min", "max"),
    aten.hardtanh.default: ("min_val", "max_val"),
    aten.clamp_min.default: ("min", None),
    aten.clamp_min.Tensor: ("min", None),
    aten.maximum.default: ("other", None),
    aten.clamp_max.default: (None, "max"),
    aten.clamp_max.Tensor: (None, "max"),
    aten.minimum.default: (None, "other"),
}
"""The names of the arguments that are the lower and the upper bound, where the op has one."""

POWERS: dict[object, float] = {aten.reciprocal.default: -1.0, aten.sqrt.default: 0.5, aten.rsqrt.default: -0.5}
"""The exponents of ops that have no argument for it."""


@dataclass(frozen=True, eq=False)
class Step:
    """`node` is made of `operand`, and of nothing else but what the step names."""

    node: Node
    operand: Node


class View(Step):
    """The elements of the operand, each once.  Of the one part of a split the operand is the split: two steps."""


class OrderedView(View):
    """A view that leaves element n at place n, counted row by row."""


class Expand(Step):
    """The elements of the operand, repeated."""


class Elementwise(Step):
    """Each element of the operand, changed by itself."""

    @property
    def broadcasts(self) -> bool:
        """True where the result is not provably of the operand's shape: a bound or a factor may be larger."""
        return not same_shape(value(self.operand).shape, value(self.node).shape)


class Cast(Elementwise):
    """To another floating-point dtype, on the same device."""


class ExactCast(Cast):
    """From 16 bits or more to more bits: a cast that loses nothing."""


class RoundingCast(Cast):
    """A cast that may lose something."""


class Round(Elementwise):
    """To whole numbers."""


class Abs(Elementwise):
    """The magnitudes."""


@dataclass(frozen=True, eq=False)
class Clamp(Elementwise):
    """Between bounds: as the call gives them, None where it gives none."""

    low: object
    high: object

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both bounds as numbers, infinite where there is none; None where one of them is not a constant."""
        low = -math.inf if self.low is None else constant(self.low)
        high = math.inf if self.high is None else constant(self.high)
        return None if low is None or high is None else (low, high)


@dataclass(frozen=True, eq=False)
class Scaled(Elementwise):
    """The operand times or over the number `by`, which is finite and not 0."""

    by: float
    divides: bool

    @property
    def factor(self) -> float:
        """What the operand is multiplied by."""
        return 1.0 / self.by if self.divides else self.by


@dataclass(frozen=True, eq=False)
class Inverse(Elementwise):
    """The number `by`, which is finite and not 0, over the operand."""

    by: float


@dataclass(frozen=True, eq=False)
class Shifted(Elementwise):
    """The operand plus the number `by`."""

    by: float


@dataclass(frozen=True, eq=False)
class Power(Elementwise):
    """The operand to the power `exponent`: a square, a root, or 1 over a root.  1 over the operand is an `Inverse`."""

    exponent: float


def step(node: Node) -> Step | None:
    """What a node makes of one tensor; None where it is no such step, or says more than a step holds."""
    if is_view(node) and node.all_input_nodes:
        return (OrderedView if keeps_order(node) else View)(node, node.all_input_nodes[0])
    read = _READERS.get(node.target) if node.op == "call_function" else None
    return read(node) if read is not None and is_tensor(node) else None


def up(node: Node, *kinds: type[Step]) -> list[Step]:
    """The steps that lead to a node, as long as they are of these kinds; the last one first."""
    found: list[Step] = []
    while isinstance(taken := step(node), kinds):
        found.append(taken)
        node = taken.operand
    return found


def top(steps: list[Step], node: Node) -> Node:
    """Where the steps that lead to `node` come from."""
    return steps[-1].operand if steps else node


def views_among(steps: list[Step]) -> tuple[Node, ...]:
    """The views among steps that lead up, in graph order; what changes nothing is left out."""
    return tuple(taken.node for taken in reversed(steps) if isinstance(taken, View) and not is_noop(taken.node))


def source(node: Node, *kinds: type[Step]) -> Node:
    """What `node` is made of by steps of these kinds; itself where it is made by none."""
    return top(up(node, *kinds), node)


def clamped_before(bounds: tuple[float, float], low: float, high: float) -> tuple[float, float]:
    """The bounds of one clamp that does what a clamp to (low, high) and then one to `bounds` do: where a lower bound is
    above the upper one, the upper one counts."""
    last_low, last_high = bounds
    low, high = (min(max(min(x, high), last_low), last_high) for x in (low, high))
    return low, high


def is_cast(node: object) -> bool:
    """True for a cast to another floating-point dtype, on one device."""
    return isinstance(node, Node) and isinstance(step(node), Cast)


def is_exact_cast(node: object) -> bool:
    """True for such a cast that loses nothing."""
    return isinstance(node, Node) and isinstance(step(node), ExactCast)


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


class Scalar(NamedTuple):
    """How a number, or a tensor of one element, is prepared: `factor * tensor ** (-1 if inverse else 1)`, or `factor`
    alone where there is no tensor."""

    tensor: Node | None
    factor: float
    inverse: bool


SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, 1.0 / torch.finfo(torch.float32).tiny
"""Of the normal numbers of fp32 whose reciprocal is one too."""


def is_invertible(number: float) -> bool:
    """True for a number that fp32 holds with its reciprocal."""
    return SMALLEST <= abs(number) <= LARGEST


def scalar(arg: object) -> Scalar:
    """How a number or a tensor that is made of one element is prepared.

    Only steps that are exact, or done in fp32 or better, are looked through.  A constant is computed as the graph
    does, step by step."""
    factor, inverse = 1.0, False
    passed: list[Scaled | Inverse] = []
    while (fixed := constant(arg)) is None:
        assert isinstance(arg, Node)
        taken = step(arg)
        if isinstance(taken, (Scaled, Inverse)) and _is_wide(arg):
            times = taken.by if isinstance(taken, Inverse) else taken.factor
            scaled = factor / times if inverse else factor * times
            if not is_invertible(scaled):  # the graph multiplies in fp32: step by step it would be another
                return Scalar(arg, factor, inverse)
            passed.append(taken)
            factor, inverse = scaled, inverse != isinstance(taken, Inverse)
        elif not isinstance(taken, (View, Expand)):
            return Scalar(arg, factor, inverse)
        arg = taken.operand
    for taken in reversed(passed):
        if isinstance(taken, Inverse):
            fixed = taken.by * (1.0 / fixed if fixed else math.inf)
        else:
            fixed = taken.factor * fixed
        fixed = float(torch.tensor(fixed, dtype=value(taken.node).dtype, device="cpu"))
    return Scalar(None, fixed, False)


def is_scalar(arg: object) -> bool:
    """True for what can scale a whole tensor: a number, or one element (of floating point), perhaps expanded."""
    if number(arg) is not None:
        return True
    if not (isinstance(arg, Node) and is_tensor(arg) and value(arg).dtype.is_floating_point):
        return False
    tensor = scalar(arg).tensor
    return tensor is None or has_one_element(tensor)


def _is_wide(node: Node) -> bool:
    return value(node).dtype.is_floating_point and value(node).dtype.itemsize >= 4


def _expand(node: Node) -> Expand | None:
    operand = tensor_node(node.all_input_nodes[0])
    return None if operand is None else Expand(node, operand)


def _cast(node: Node) -> Cast | None:
    operand = tensor_node(node.all_input_nodes[0]) if node.all_input_nodes else None
    if operand is None or value(operand).device != value(node).device:
        return None
    before, after = value(operand).dtype, value(node).dtype
    if not (before.is_floating_point and after.is_floating_point):
        return None
    exact = 2 <= before.itemsize < after.itemsize
    return (ExactCast if exact else RoundingCast)(node, operand)


def _of_one(node: Node) -> Step | None:
    said = arguments(node, "self")
    operand = None if said is None else tensor_node(said[0])
    return None if operand is None else _OF_ONE[node.target](node, operand)


def _clamp(node: Node) -> Clamp | None:
    low, high = CLAMPS[node.target]
    said = arguments(node, "self", *(name for name in (low, high) if name is not None))
    if said is None:
        return None
    x, *bounds = said
    if "other" in (low, high):  # of two tensors, where neither need be a constant
        if constant(x) is not None:
            x, bounds = bounds[0], [x]
        if constant(bounds[0]) is None:
            return None
    operand = tensor_node(x)
    if operand is None:
        return None
    return Clamp(node, operand, bounds[0] if low is not None else None, bounds[-1] if high is not None else None)


def _scaled(node: Node) -> Scaled | Inverse | Power | None:
    both = operands(node, *DIVISIONS, *MULTIPLICATIONS)
    if both is None:
        return None
    if both[0] is both[1] and is_tensor(both[0]):
        return Power(node, both[0], 2.0) if calls(node, *MULTIPLICATIONS) else None
    for operand, other in (both, both[::-1]):
        by = constant(other)
        if by is None or by == 0.0 or not math.isfinite(by) or not is_tensor(operand):
            continue
        if calls(node, *MULTIPLICATIONS):
            return Scaled(node, operand, by, divides=False)
        return Scaled(node, operand, by, divides=True) if other is both[1] else Inverse(node, operand, by)
    return None


def _shifted(node: Node) -> Shifted | None:
    both = operands(node, aten.add.Tensor, aten.add.Scalar)
    for x, other in () if both is None else (both, both[::-1]):
        operand, by = tensor_node(x), constant(other)
        if operand is not None and by is not None:
            return Shifted(node, operand, by)
    return None


def _power(node: Node) -> Power | Inverse | None:
    said = arguments(node, "self", *(("exponent",) if node.target is aten.pow.Tensor_Scalar else ()))
    operand = None if said is None else tensor_node(said[0])
    exponent = POWERS.get(node.target) or (None if said is None else number(said[1]))
    if operand is None or exponent is None:
        return None
    return Inverse(node, operand, 1.0) if exponent == -1.0 else Power(node, operand, exponent)


_OF_ONE: dict[object, type[Step]] = {aten.round.default: Round, aten.abs.default: Abs}

_READERS: dict[object, Callable[[Node], Step | None]] = {
    aten.expand.default: _expand,
    aten.add.Tensor: _shifted,
    aten.add.Scalar: _shifted,
    aten.pow.Tensor_Scalar: _power,
    **dict.fromkeys(POWERS, _power),
    **dict.fromkeys(_OF_ONE, _of_one),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(CLAMPS, _clamp),
    **dict.fromkeys(DIVISIONS | MULTIPLICATIONS, _scaled),
}
