"""GroupQuantize: FP8 quantisation by scales chosen from the tensor itself, one for each group of neighbours.

Read upwards from the cast to FP8, as `Quantize` is: clamps and views, one division by a tensor of scales, and the
tensor; from the scales, too: views and expansions, a lower bound of them or of the magnitudes, the division by the
largest code, reciprocals, the maximum over the group, `abs`.  Views only where they keep the order of the elements, so
that a group is one in the tensor as well.  Scales may also be made beside the way to the division, from what is on it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes import quant
from fusion_passes.graph.arguments import arguments, number, operands
from fusion_passes.graph.read import (
    aten,
    calls,
    is_high_precision,
    is_noop,
    is_tensor,
    is_view,
    keeps_order,
    same_shape,
    value,
)
from fusion_passes.graph.steps import CASTS, DIVISIONS, MULTIPLICATIONS, constant, is_cast, is_exact_cast
from fusion_passes.graph.symbolic import known
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.quantize import clamped, clamped_before
from fusion_passes.idioms.reading import Unread, depends_on, made_by, op_call, op_name, read_all, show
from fusion_passes.quant import FP8_DTYPES, dtype_name

OPAQUE = "fusion_passes::quantize_fp8_dynamic"


@dataclass(frozen=True, eq=False)
class GroupQuantize(Idiom):
    """`output = views(cast(clamp(input / scale)))` with `scale = max(amax(|input|) / largest code, min_scale)`.

    input: the high-precision tensor before any cast and view of the quantisation.
    scales: the node that holds the scales, one for each `group_size` neighbours of input, in their order; None where
        nothing does.
    clamp: the bounds applied before the cast; None without a clamp.
    min_scale, max_scale: the bounds of the scales; 0 without a lower one, and codes are NaN where the scale is 0.
    inverse: the graph multiplies by the reciprocal of the scales, which is infinite where they are too small for one.
    opaque: the op's name where one op does it all, else None.
    views: those from the input to the output, in graph order; the codes go through them too.
    """

    input: Node
    scales: Node | None
    group_size: int
    dtype: torch.dtype
    clamp: tuple[float, float] | None
    min_scale: float
    max_scale: float = math.inf
    inverse: bool = False
    opaque: str | None = None
    views: tuple[Node, ...] = ()

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What it computes, in plain torch, from the value of `input`: codes, without the views, and scales."""
        groups = x.float().reshape(-1, self.group_size)
        limit = quant.max_value(self.dtype)
        scales = (groups.abs().amax(-1, keepdim=True) / limit).clamp(self.min_scale, self.max_scale)
        codes = groups / scales
        if self.clamp is not None:
            codes = codes.clamp(*self.clamp)
        return codes.to(self.dtype).reshape(x.shape), scales.flatten()


def recognize(graph: Graph) -> Iterator[GroupQuantize | NearMiss]:
    """Every dynamic quantisation per group of the graph, and what only looks like one.  Never raises."""
    return read_all(graph, "group_quantize", _read)


def _read(node: Node) -> GroupQuantize | None:
    if op_call(node, among=(OPAQUE,)) is not None:
        return _read_opaque(node)
    if not (calls(node, *CASTS) and is_tensor(node) and value(node).dtype in FP8_DTYPES and is_cast(node)):
        return None
    return _Reading(node).read()


@dataclass(frozen=True)
class _Derived:
    """What is made of a group's largest magnitude: `clamp(magnitude * factor, low, high)`, or 1 over that."""

    factor: float = 1.0
    low: float = 0.0
    high: float = math.inf
    flipped: bool = False

    def times(self, number: float, dtype: torch.dtype) -> _Derived:
        """Multiplied by a positive number, in dtype."""
        number = 1.0 / number if self.flipped else number
        low, high = _rounded(self.low * number, dtype), _rounded(self.high * number, dtype)
        return replace(self, factor=self.factor * number, low=low, high=high)

    def over(self, number: float, dtype: torch.dtype) -> _Derived:
        """Divided by a positive number, in dtype."""
        if self.flipped:
            return self.times(1.0 / number, dtype)
        low, high = _rounded(self.low / number, dtype), _rounded(self.high / number, dtype)
        return replace(self, factor=self.factor / number, low=low, high=high)

    def clamped(self, low: float, high: float, dtype: torch.dtype) -> _Derived:
        """Between bounds, as `torch.clamp` has it."""
        low, high = (_rounded(min(max(x, low), high), dtype) for x in (self.low, self.high))
        return replace(self, low=low, high=high)

    def is_scale(self, limit: float) -> bool:
        """Whether it is the magnitude / limit, between bounds."""
        return not self.flipped and math.isclose(self.factor * limit, 1.0, rel_tol=1e-6)

    def is_like(self, other: _Derived) -> bool:
        """Whether it is the other, but for the rounding of constants."""
        same = ((self.factor, other.factor), (self.low, other.low), (self.high, other.high))
        return self.flipped == other.flipped and all(math.isclose(a, b, rel_tol=1e-6) for a, b in same)


def _rounded(number: float, dtype: torch.dtype) -> float:
    """As dtype holds it; 16 bits count as fp32, which is what Inductor computes them in."""
    return float(torch.tensor(number, dtype=dtype if dtype.itemsize > 4 else torch.float32, device="cpu"))


class _Reading:
    """One walk from a cast to FP8 up to the tensor that is quantised."""

    def __init__(self, output: Node) -> None:
        self.output = output
        self.limit = quant.max_value(value(output).dtype)
        self.nodes = {output}
        self.low, self.high = -math.inf, math.inf
        self.chain: list[tuple[Node, _Derived]] = []  # from the maximum to the division, with what each node is
        self.group_size = 0

    def read(self) -> GroupQuantize | None:
        step = self.output.all_input_nodes[0]
        views: list[Node] = []
        rounded = None
        while True:
            step, passed = self._through(step)
            views[:0] = passed
            if is_cast(step):
                rounded = value(step).dtype
                step = step.all_input_nodes[0]
                continue
            clamp = _clamp(step)
            if clamp is None:
                break
            if math.isnan(clamp.low) or math.isnan(clamp.high):
                return None  # said of a static quantisation too
            self.low, self.high = clamped_before((self.low, self.high), clamp.low, clamp.high)
            self.nodes.add(step)
            step = clamp.operand
        found = self._divided(step)
        if found is None:
            return None  # no dynamic quantisation
        x, magnitudes = found
        root, before = self._through(x)
        magnitude, _ = self._through(magnitudes)
        self.nodes |= {step, magnitude}
        inner, _ = (
            self._through(magnitude.all_input_nodes[0]) if calls(magnitude, aten.abs.default) else (magnitude, ())
        )
        if inner is not root:
            return None  # the scales come from another tensor
        if rounded is not None:
            self.fail(f"the quotient is rounded to {dtype_name(rounded)} before it is quantised")
        if magnitude is inner:
            self.fail("the scales come from the largest element, not from the largest magnitude")
        if not is_high_precision(root):
            self.fail(f"quantises {root.name}, which is not a high-precision floating-point tensor")
        scale = self.chain[-1][1]
        if scale.flipped:
            scale = replace(scale, flipped=False)
        return GroupQuantize(
            output=self.output,
            scales=self._scales(scale),
            nodes=frozenset(self.nodes),
            input=root,
            group_size=self.group_size,
            dtype=value(self.output).dtype,
            clamp=None if (self.low, self.high) == (-math.inf, math.inf) else (self.low, self.high),
            min_scale=scale.low,
            max_scale=scale.high,
            inverse=any(derived.flipped for _, derived in self.chain),
            views=(*before, *views),
        )

    def fail(self, reason: str) -> NoReturn:
        """The reading ends here.  The place is always the cast, where a static quantisation would be found too."""
        raise Unread(self.output, reason)

    def _through(self, node: Node) -> tuple[Node, tuple[Node, ...]]:
        """Up past views that keep the order and casts that lose nothing, which belong to the quantisation."""
        views: list[Node] = []
        while keeps_order(node) or is_exact_cast(node):
            self.nodes.add(node)
            if keeps_order(node) and not is_noop(node):
                views.insert(0, node)
            node = node.all_input_nodes[0]
        return node, tuple(views)

    def _divided(self, node: Node) -> tuple[Node, Node] | None:
        """(tensor, magnitudes that its scales come from) of a division by scales; None where it is none."""
        both = operands(node, *DIVISIONS, *MULTIPLICATIONS)
        if both is None:
            return None
        left, right = both
        pairs = [(left, right)] if calls(node, *DIVISIONS) else [(left, right), (right, left)]
        for x, scale in pairs:
            if isinstance(x, Node) and is_tensor(x) and isinstance(scale, Node) and is_tensor(scale):
                kept = set(self.nodes)
                magnitudes = self._magnitudes(scale, x, flipped=calls(node, *MULTIPLICATIONS))
                if magnitudes is not None:
                    return x, magnitudes
                self.nodes = kept
        return None

    def _magnitudes(self, node: Node, x: Node, *, flipped: bool) -> Node | None:
        """What the scales at `node`, for the tensor x, are the maximum of over groups; what is in between is recorded.
        flipped: the tensor is multiplied by them, so a reciprocal must be on the way."""
        shape = value(x).shape
        steps: list[Node] = []
        widths: list[int | torch.SymInt] = []  # over how many elements a scale is spread
        spread = value(node).shape
        if not same_shape(spread, shape):
            alike = len(spread) == len(shape) and same_shape(spread[:-1], shape[:-1])
            if not (alike and known(spread[-1] == 1)):
                return None
            widths.append(shape[-1])
        while (largest := _largest(node)) is None:
            self.nodes.add(node)
            if calls(node, aten.expand.default) and not is_view(node):
                before, after = value(node.all_input_nodes[0]).shape, value(node).shape
                if not (len(before) == len(after) and same_shape(before[:-1], after[:-1]) and known(before[-1] == 1)):
                    return None
                widths.append(after[-1])
                node = node.all_input_nodes[0]
                continue
            operand = _operand(node)
            if operand is None:
                if _reaches_maximum(node, self._through(x)[0]):
                    self.fail(f"the scales pass through {op_name(node)} ({node.name}): {_instead(node)}")
                return None
            steps.insert(0, node)
            node = operand
        source, dims = largest
        self.nodes |= {node, made_by(node)}
        rank = value(source).ndim
        if [d % rank for d in dims] != [rank - 1]:
            return None  # not of neighbours
        group_size = value(source).shape[-1]
        if len(widths) != 1 or not isinstance(group_size, int) or not known(widths[0] == group_size):
            return None
        self.group_size = group_size
        self._settle(node, steps, flipped)
        return source

    def _settle(self, maximum: Node, steps: list[Node], flipped: bool) -> None:
        """Read the steps from the maximum to the scales, in graph order."""
        derived = _Derived()
        self.chain = [(maximum, derived)]
        for node in filter(is_tensor, steps):
            after = self._after(node, derived, value(maximum).dtype)
            if after is None:
                self.fail(
                    f"the scales pass through {op_name(node)} ({node.name}), which rounds them to "
                    f"{dtype_name(value(node).dtype)}: choose them in float32"
                )
            derived = after
            self.chain.append((node, derived))
        if derived.flipped != flipped:
            self.fail("the tensor is multiplied by its scales, not divided by them")
        if not math.isclose(derived.factor * self.limit, 1.0, rel_tol=1e-6):
            self.fail(f"the scales are the largest magnitude times {derived.factor:g}, not divided by {self.limit:g}")
        factors = [step.factor * self.limit for _, step in self.chain]
        if not all(1.0 - 1e-6 <= factor <= self.limit * (1.0 + 1e-6) for factor in factors):
            self.fail(
                "on the way from the largest magnitudes to the scales are numbers larger or smaller than both, which "
                "can be infinite or 0: divide by the largest code in one step"
            )

    def _after(self, node: Node, before: _Derived, magnitudes: torch.dtype) -> _Derived | None:
        """What a step makes of its operand; None where it rounds.  magnitudes: the dtype of the maximum."""
        dtype = value(node).dtype
        if calls(node, aten.reciprocal.default):
            return None if dtype.itemsize < 4 else replace(before, flipped=not before.flipped)
        if (clamp := _clamp(node)) is not None:
            if before.flipped:
                self.fail(f"the reciprocal of the scales passes through {op_name(node)} ({node.name})")
            if math.isnan(clamp.low) or math.isnan(clamp.high):
                self.fail("the scales, or the magnitudes that they are made of, are clamped to nan")
            self._check_bound(clamp.low, dtype)
            return before.clamped(clamp.low, clamp.high, dtype)
        if (scaled := _scaled(node)) is not None:
            number, divides = scaled
            if dtype.itemsize < 4:
                return None
            return before.over(number, dtype) if divides else before.times(number, dtype)
        if is_cast(node) and not is_exact_cast(node):
            if dtype is torch.float32:
                return before.clamped(-math.inf, math.inf, dtype)
            # A maximum of numbers in this dtype is one; of a bound below, Inductor keeps all digits.
            if dtype is not magnitudes or before.flipped or before.factor != 1.0:
                return None
            self._check_bound(before.low, dtype)
        return before

    def _check_bound(self, bound: float, dtype: torch.dtype) -> None:
        """That a lower bound of the magnitudes is a number like others in the dtype that they are in."""
        if dtype.itemsize < 4 and 0.0 < bound < (tiny := torch.finfo(dtype).tiny):
            self.fail(
                f"the lower bound of the magnitudes, {bound:g}, is less than the smallest normal number of "
                f"{dtype_name(dtype)}, {tiny:g}, which they are in: clamp them in float32"
            )

    def _scales(self, scale: _Derived) -> Node | None:
        """The node that holds the scales: one on the way to the division that is read elsewhere, or one that is made of
        such, or, where nothing reads them, any on the way; None where there is none."""
        count = value(self.chain[0][0]).numel()
        chain = [(node, derived) for node, derived in self.chain if known(value(node).numel() == count)]  # not spread
        on_the_way = [node for node, derived in chain if derived.is_like(scale)]
        read = [node for node in on_the_way if not self.nodes.issuperset(node.users)]
        if read or not any(not self.nodes.issuperset(node.users) for node, _ in chain):
            return next(iter(read or on_the_way), None)
        for node, derived in chain:
            if (path := self._aside(node, derived, scale)) is not None:
                self.nodes.update(path)
                return path[-1]
        return on_the_way[0] if on_the_way else None

    def _aside(self, node: Node, derived: _Derived, scale: _Derived) -> list[Node] | None:
        """The steps from a node on the way to the division to one beside the way that is the scale."""
        for user in node.users:
            if user in self.nodes or not is_tensor(user) or _operand(user) is not node:
                continue
            after = None if _clamp(user) is not None else self._after(user, derived, value(node).dtype)
            if after is None:
                continue
            if after.is_like(scale):
                return [user]
            if (rest := self._aside(user, after, scale)) is not None:
                return [user, *rest]
        return None


def _largest(node: Node) -> tuple[Node, list[int]] | None:
    """(tensor, dimensions) where the node is a maximum over dimensions."""
    # Whether the dimension is kept shows in the shape, which the way on is judged by.
    if (said := arguments(node, "self", "dim", "keepdim")) is not None and calls(node, aten.amax.default):
        return said[0], [int(d) for d in said[1]]
    call = made_by(node)
    if node is not call and calls(call, aten.max.dim) and node.args[1] == 0:
        said = arguments(call, "self", "dim", "keepdim")
        return None if said is None else (said[0], [said[1]])
    return None


def _operand(node: Node) -> Node | None:
    """What a step between the maximum and the scales is a step from; None for what is none."""
    if (clamp := _clamp(node)) is not None:
        return clamp.operand
    if len(node.all_input_nodes) == 0 or not (is_tensor(node) or keeps_order(node)):
        return None
    step = calls(node, aten.reciprocal.default) or keeps_order(node) or is_cast(node)
    return node.all_input_nodes[0] if step or _scaled(node) is not None else None


POWERS_OF_TWO = frozenset(
    {aten.exp2.default, aten.pow.Scalar, aten.ldexp.default, aten.ldexp.Tensor, aten.ceil.default, aten.log2.default}
)


def _instead(node: Node) -> str:
    """What the scales are where they pass through an op that is no step from a maximum to scales."""
    if calls(node, *POWERS_OF_TWO):
        return "rounded to powers of two, they are not the largest magnitude / code"
    return "not the largest magnitude / code"


def _reaches_maximum(node: Node, x: Node) -> bool:
    """True where ops of one tensor each lead up to a maximum of x, soon."""
    for _ in range(8):
        if (largest := _largest(node)) is not None:
            return depends_on(largest[0], x)
        if len(node.all_input_nodes) != 1 or node.op != "call_function":
            return False
        node = node.all_input_nodes[0]
    return False


class _Clamp(NamedTuple):
    operand: Node
    low: float
    high: float


def _clamp(node: Node) -> _Clamp | None:
    """What is clamped, and the bounds, where they are constants."""
    found = clamped(node)
    if found is None:
        return None
    operand, low, high = found
    bounds = (-math.inf if low is None else constant(low), math.inf if high is None else constant(high))
    if (low is None and high is None) or bounds[0] is None or bounds[1] is None:
        return None
    if not same_shape(value(operand).shape, value(node).shape):
        return None
    return _Clamp(operand, bounds[0], bounds[1])


def _scaled(node: Node) -> tuple[float, bool] | None:
    """(f, whether it divides) where the node is its one operand times or over f > 0."""
    both = operands(node, *DIVISIONS, *MULTIPLICATIONS)
    if both is None or len(node.all_input_nodes) != 1:
        return None
    left, right = both
    factor = constant(left) if calls(node, *MULTIPLICATIONS) and isinstance(right, Node) else constant(right)
    return None if factor is None or not 0.0 < factor < math.inf else (factor, calls(node, *DIVISIONS))


def _read_opaque(node: Node) -> GroupQuantize | None:
    """`quantize_fp8_dynamic(x, *, dtype, granularity, group_size, scale_upper_bound, scale_lower_bound)`, which returns
    codes and scales."""
    call = op_call(node, among=(OPAQUE,))
    assert call is not None
    given = call.arguments
    if given["granularity"] != "group":
        return None
    x, dtype = given["x"], given["dtype"]
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if 0 not in results or not isinstance(x, Node) or not isinstance(dtype, torch.dtype):
        return None
    if not isinstance(given["group_size"], int):
        return None
    for name in ("scale_upper_bound", "scale_lower_bound"):
        if given[name] is not None and number(given[name]) is None:
            raise Unread(results[0], f"{name} is {show(given[name])}, not a number")
    limit, least, most = quant.max_value(dtype), number(given["scale_lower_bound"]), number(given["scale_upper_bound"])
    return GroupQuantize(
        output=results[0],
        nodes=frozenset({node, *results.values()}),
        input=x,
        scales=results.get(1),
        group_size=given["group_size"],
        dtype=dtype,
        clamp=(-limit, limit),
        min_scale=quant.SMALLEST_SCALE if least is None else _rounded(least, torch.float32),
        max_scale=math.inf if most is None else most,
        opaque=op_name(node),
    )


def _flat(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    spec = quant.QuantSpec(dtype, "group", 32, static=False)
    scales = quant.choose_scale(x, spec)
    return quant.quantize(x, scales, dtype), scales


def _grouped(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups / scales).clamp(-limit, limit).to(dtype)
    return codes.flatten(-2), scales.squeeze(-1)


def _reciprocal(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.reshape(-1, x.shape[-1] // 32, 32)
    scales = groups.abs().amax(-1).float() * (1.0 / limit)
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups * (1.0 / scales)[..., None]).clamp(-limit, limit).to(dtype)
    return codes.view(x.shape), scales


def _lower_bound_of_the_magnitude(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.view(x.shape[0], -1, 32)
    scales = groups.abs().float().amax(2).clamp(1e-4) / limit
    return (groups.float() / scales.unsqueeze(2)).to(dtype).view(x.shape), scales


def _lower_bound_in_the_dtype(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.reshape(x.numel() // 32, 32)
    scales = groups.abs().max(dim=-1, keepdim=True)[0].clamp(min=2.0**-13).to(torch.float32) / limit
    codes = (groups / scales).clamp(min=-limit, max=limit).to(dtype)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], x.shape[-1] // 32)


def _column_major(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.view(-1, x.shape[-1] // 32, 32)
    scales = (groups.abs().max(dim=-1, keepdim=True)[0].float() / limit).clamp(min=1.0 / (limit * 512.0))
    codes = (groups / scales).clamp(-limit, limit).to(dtype).view(x.shape)
    return codes, scales.squeeze(-1).transpose(-2, -1).contiguous().transpose(-1, -2)


def _largest_code_over_the_magnitude(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.view(x.shape[0], -1, 32)
    magnitude = torch.maximum(groups.abs().float().amax(dim=2), torch.full((), 1e-4, device=x.device))
    return (groups * (limit / magnitude.unsqueeze(2))).to(dtype).view(x.shape), magnitude / limit


def _float64(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.reshape(x.shape[0], -1, 32)
    inverse = (limit / groups.abs().amax(-1, keepdim=True).to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    codes = (groups * inverse).clamp(-limit, limit).to(dtype)
    return codes.reshape(x.shape), (1.0 / inverse).squeeze(-1)


def _no_lower_bound(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.float().view(x.shape[0], -1, 32)
    scales = groups.abs().amax(-1) / limit
    return (groups / scales[..., None]).clamp(-limit, limit).to(dtype).view(x.shape), scales


SPELLINGS: dict[str, Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]] = {
    "scales repeated over their groups": _flat,
    "in the shape of groups": _grouped,
    "multiply by the reciprocal": _reciprocal,
    "lower bound of the magnitude, no clamp": _lower_bound_of_the_magnitude,
    "lower bound of the magnitude, in its dtype": _lower_bound_in_the_dtype,
    "lower bound of the scale, scales by columns": _column_major,
    "times the largest code over the magnitude": _largest_code_over_the_magnitude,
    "by way of float64": _float64,
    "no lower bound": _no_lower_bound,
}
"""What is read as a `GroupQuantize`: (x [tokens, hidden], FP8 dtype) -> codes, scales of groups of 32."""
