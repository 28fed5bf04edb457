"""Quantize: static per-tensor FP8 quantisation, `cast(clamp(x / scale))`.

Read upwards from the cast to FP8: casts, clamps and views in any order, one division or multiplication by a scale of
one element, views, and an exact cast of x to a wider dtype.  A cast alone is a quantisation with scale 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes.graph.arguments import arguments, number, operands, tensor_node
from fusion_passes.graph.read import (
    argument,
    aten,
    calls,
    has_one_element,
    is_high_precision,
    is_noop,
    is_tensor,
    is_view,
    same_shape,
    through_views,
    value,
    view_source,
)
from fusion_passes.graph.steps import CASTS, DIVISIONS, MULTIPLICATIONS, constant, is_cast, is_exact_cast
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.opaque import OPAQUE, OpaqueOp
from fusion_passes.idioms.reading import OpCall, Unread, depends_on, op_call, read_all, shape_of, show
from fusion_passes.quant import FP8_DTYPES, dtype_name

QUANTIZED_DECOMPOSED = "quantized_decomposed::quantize_per_tensor"
"""Rounds to whole numbers, also for FP8.  Inductor knows this op, so it is not among the opaque ones."""


@dataclass(frozen=True, eq=False)
class Quantize(Idiom):
    """`output = views(cast(clamp(round(input / (scale * scale_factor)))))`.

    input: the high-precision tensor before any cast of the quantisation.
    scale: a tensor of one element (any rank, any float dtype), or None where the scale is the number `scale_factor`.
        Scalar steps that only prepare it are read: `1 / s` becomes `s` with the other `inverse`, `s * 2` becomes
        `scale_factor`, views and casts to a wider dtype fall away.  So `x * (1 / s)` is read as a division by s,
        which is the same up to the last bit of fp32.
    inverse: the graph multiplies by `scale * scale_factor` where it would divide.
    clamp: the bounds applied before the cast, in the units of the codes (one may be infinite); None without a clamp.
    rounding: "cast" where the cast rounds; "integer" where the graph rounds to whole numbers before.
    compute_dtype: the narrowest dtype in which the quotient is held before it is cast.
    opaque: the op's name where one op does it all, else None.
    keeps_nan: NaN stays NaN; False where an op makes the largest code of it.
    views: those that stand inside the chain, in graph order; the FP8 codes go through them too.
    """

    input: Node
    scale: Node | None
    scale_factor: float
    inverse: bool
    dtype: torch.dtype
    clamp: tuple[float, float] | None
    compute_dtype: torch.dtype
    rounding: str = "cast"
    opaque: str | None = None
    keeps_nan: bool = True
    views: tuple[Node, ...] = ()

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors it reads: input, then scale where it is one."""
        return (self.input,) if self.scale is None else (self.input, self.scale)

    def reference(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """What it computes, in plain torch, from the values of `input` and `scale`; without the views."""
        total: Tensor | float = self.scale_factor
        if self.scale is not None:
            if scale is None:
                raise ValueError("this quantisation has a scale tensor: give its value")
            total = scale.reshape(()).to(x.device, torch.float32) * self.scale_factor
        y = x.float() * total if self.inverse else x.float() / total
        y = y.to(self.compute_dtype).float()
        if self.rounding == "integer":
            y = y.round()
        if self.clamp is not None:
            y = y.clamp(*self.clamp)
        if not self.keeps_nan:
            y = y.nan_to_num(torch.finfo(self.dtype).max, posinf=math.inf, neginf=-math.inf)
        return y.to(self.dtype)


def recognize(graph: Graph, apart_from: Collection[Node] = ()) -> Iterator[Quantize | NearMiss]:
    """Every static per-tensor FP8 quantisation of the graph, and what only looks like one.  Never raises.

    apart_from: casts that something else has been said about."""
    return read_all(graph, "quantize", lambda node: None if node in apart_from else _read(node))


def _read(node: Node) -> Quantize | None:
    if not is_tensor(node):
        return None
    if (call := op_call(node, among=OPAQUE)) is not None:
        return _opaque(call, OPAQUE[call.name])
    if (call := op_call(node, among=(QUANTIZED_DECOMPOSED,))) is not None:
        return _read_quantized_decomposed(call)
    if not (calls(node, *CASTS) and value(node).dtype in FP8_DTYPES and is_cast(node)):
        return None
    source = node.all_input_nodes[0]
    if not is_high_precision(source):
        return None  # from one FP8 dtype to another
    return _Chain(node).read(source)


class _Chain:
    """One walk from a cast to FP8 up to the tensor that is quantised."""

    def __init__(self, output: Node) -> None:
        self.output = output
        self.nodes = {output}
        self.views: list[Node] = []
        self.dtypes: set[torch.dtype] = set()
        self.low, self.high = -math.inf, math.inf
        self.rounding = "cast"
        self.scale: Node | None = None
        self.factor = 1.0
        self.inverse = False

    def read(self, source: Node) -> Quantize:
        before_narrowing: tuple[Node, set[Node], list[Node], set[torch.dtype]] | None = None
        below = current = source  # `below` is where the chain ends if nothing more of it is found
        while True:
            step, passed = through_views(current)
            if is_cast(step):
                if not is_exact_cast(step) and before_narrowing is None:
                    before_narrowing = (below, set(self.nodes), list(self.views), set(self.dtypes))
                self._take(step, passed)
                self.dtypes.add(value(step).dtype)
                below = current = step.all_input_nodes[0]
                continue
            if (operand := self._clamp_or_round(step)) is not None:
                before_narrowing = None
                self._take(step, passed)
                self.dtypes.add(value(step).dtype)
                below = current = operand
                continue
            break
        operand = self._divided(step)
        if operand is None:
            # A narrowing cast with nothing of the quantisation before it is the producer's own rounding.
            if before_narrowing is not None:
                below, self.nodes, self.views, self.dtypes = before_narrowing
            return self._finish(below)
        self._take(step, passed)
        self.dtypes.add(value(step).dtype)
        return self._finish(self._widened(operand))

    def _take(self, step: Node, passed: tuple[Node, ...]) -> None:
        """`step` and the views behind it belong to the chain."""
        self.nodes |= {step, *passed}
        self.views[:0] = [node for node in passed if not is_noop(node)]

    def _clamp_or_round(self, node: Node) -> Node | None:
        """The operand of a clamp or of a rounding to whole numbers, which is recorded; None for anything else."""
        if calls(node, aten.round.default):
            self.rounding = "integer"
            return tensor_node(argument(node, 0, "self"))
        found = clamped(node)
        if found is None:
            return None
        operand, low, high = found
        if not same_shape(value(operand).shape, value(node).shape):
            raise Unread(node, f"a bound broadcasts the tensor from {shape_of(operand)} to {shape_of(node)}")
        limits = [self._limit(node, low, -math.inf), self._limit(node, high, math.inf)]
        self.low, self.high = clamped_before((self.low, self.high), *limits)
        return operand

    def _limit(self, node: Node, bound: object, without: float) -> float:
        """A bound of the clamp `node` as a number."""
        limit = without if bound is None else constant(bound)
        if limit is None:
            raise Unread(node, f"clamps to {show(bound)}, which is not a constant")
        if math.isnan(limit):
            raise Unread(node, "clamps to nan, which makes every code NaN")
        if self.rounding == "integer" and math.isfinite(limit) and limit != math.trunc(limit):
            raise Unread(node, f"clamps to {limit:g}, which is no whole number, before it rounds to whole numbers")
        return limit

    def _divided(self, node: Node) -> Node | None:
        """The operand of a division or multiplication by the scale, which is recorded; None for anything else."""
        both = operands(node, *DIVISIONS, *MULTIPLICATIONS)
        if both is None or not is_tensor(node):
            return None
        left, right = both
        if calls(node, *MULTIPLICATIONS) and _is_scalar(left) and not _is_scalar(right):
            left, right = right, left
        if not is_high_precision(left) or not isinstance(left, Node):
            return None  # a number divided by a tensor
        if not _is_scalar(right):
            scale, *_ = _peel(right) if is_tensor(right) else (right,)
            self._refuse_scale(node, left, scale)
            return None
        scale, factor, flipped = _peel(right)
        if not same_shape(value(node).shape, value(left).shape):
            raise Unread(node, f"the scale's shape broadcasts the tensor from {shape_of(left)} to {shape_of(node)}")
        divides = calls(node, *DIVISIONS)
        if scale is None:
            divides = divides != flipped
            flipped = False
        _check_number(node, factor)
        # y = x / (factor * scale ** p) or y = x * (factor * scale ** p), with p = -1 where the scale was flipped.
        self.scale = scale
        self.inverse = divides == flipped
        self.factor = 1.0 / factor if flipped else factor
        return left

    def _refuse_scale(self, node: Node, x: Node, scale: object) -> None:
        """Say why an operand is no scale, unless this is the product or quotient of two whole tensors."""
        if not isinstance(scale, Node):
            raise Unread(node, f"the scale is {show(scale)}, not a number or a tensor")
        seen = scale.meta.get("val")
        if isinstance(seen, (torch.SymFloat, torch.SymInt, torch.SymBool)):
            raise Unread(node, f"the scale is a symbolic number ({type(seen).__name__}); make it a tensor")
        if not isinstance(seen, Tensor):
            raise Unread(node, f"the scale, {scale.name}, is not a tensor")
        if has_one_element(scale):
            raise Unread(node, f"the scale has dtype {dtype_name(seen.dtype)}, not a floating-point one")
        if same_shape(seen.shape, value(node).shape) and same_shape(value(x).shape, value(node).shape):
            return
        leading = len(seen.shape) - 1
        if len(seen.shape) and same_shape(seen.shape[-1:], [1]):
            kind = "per-token or per-group"
        elif same_shape(seen.shape, [1] * leading + [value(x).shape[-1]]):
            kind = "per-channel"
        else:
            kind = "per-group"
        raise Unread(node, f"scale has shape {shape_of(scale)}: a {kind} quantisation, not a static per-tensor one")

    def _widened(self, x: Node) -> Node:
        """Walk on from the divided tensor through exact casts, and views between them."""
        below = x
        while True:
            step, passed = through_views(below)
            if not is_exact_cast(step):
                break
            self._take(step, passed)
            below = step.all_input_nodes[0]
        both = operands(step, *DIVISIONS, *MULTIPLICATIONS)
        if both is not None and _is_scalar(both[0]) != _is_scalar(both[1]):
            raise Unread(step, f"scaled twice: {step.name} scales the tensor before the quantisation does")
        return below

    def _finish(self, x: Node) -> Quantize:
        if not is_high_precision(x):
            raise Unread(x, f"quantises {x.name}, which is not a high-precision floating-point tensor")
        if self.scale is not None:
            _check_scale(self.output, self.scale, x)
        return Quantize(
            output=self.output,
            nodes=frozenset(self.nodes),
            input=x,
            scale=self.scale,
            scale_factor=self.factor,
            inverse=self.inverse,
            dtype=value(self.output).dtype,
            clamp=None if (self.low, self.high) == (-math.inf, math.inf) else (self.low, self.high),
            compute_dtype=self._compute_dtype(value(x).dtype),
            rounding=self.rounding,
            views=tuple(self.views),
        )

    def _compute_dtype(self, input_dtype: torch.dtype) -> torch.dtype:
        dtypes = self.dtypes or {input_dtype}
        if {torch.float16, torch.bfloat16} <= dtypes:
            raise Unread(self.output, "the quotient is rounded to float16 and to bfloat16")
        return min(dtypes, key=lambda dtype: dtype.itemsize)


def clamped_before(bounds: tuple[float, float], low: float, high: float) -> tuple[float, float]:
    """The bounds of one clamp that does what a clamp to (low, high) and then one to `bounds` do: where a lower bound is
    above the upper one, the upper one counts."""
    last_low, last_high = bounds
    low, high = (min(max(min(x, high), last_low), last_high) for x in (low, high))
    return low, high


def clamped(node: Node) -> tuple[Node, object, object] | None:
    """(operand, lower bound, upper bound) of a clamp; None where it is none, or of two tensors that are no bound."""
    low: object = None
    high: object = None
    if calls(node, aten.clamp.default, aten.clamp.Tensor):
        x, low, high = arguments(node, "self", "min", "max") or (None, None, None)
    elif calls(node, aten.hardtanh.default):
        x, low, high = arguments(node, "self", "min_val", "max_val") or (None, None, None)
    elif calls(node, aten.clamp_min.default, aten.clamp_min.Tensor):
        x, low = arguments(node, "self", "min") or (None, None)
    elif calls(node, aten.clamp_max.default, aten.clamp_max.Tensor):
        x, high = arguments(node, "self", "max") or (None, None)
    elif (both := operands(node, aten.minimum.default, aten.maximum.default)) is not None:
        x, bound = both if constant(both[0]) is None else reversed(both)
        if constant(bound) is None:
            return None
        low, high = (None, bound) if calls(node, aten.minimum.default) else (bound, None)
    else:
        return None
    operand = tensor_node(x)
    return None if operand is None else (operand, low, high)


def _is_scalar(arg: object) -> bool:
    """True for what can be a scale for a whole tensor: a number, or one element (of floating point) expanded."""
    if number(arg) is not None:
        return True
    if not (isinstance(arg, Node) and is_tensor(arg) and value(arg).dtype.is_floating_point):
        return False
    scale, *_ = _peel(arg)
    return scale is None or has_one_element(scale)


SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, 1.0 / torch.finfo(torch.float32).tiny
"""Of the normal numbers of fp32 whose reciprocal is one too."""


def _is_invertible(number: float) -> bool:
    return SMALLEST <= abs(number) <= LARGEST


def _check_number(node: Node, scale: float) -> None:
    """A scale, or a factor of one, is a number that may as well be its reciprocal: Inductor multiplies where the graph
    divides by a number."""
    if not _is_invertible(scale):
        raise Unread(
            node,
            f"the scale is {scale:g}, which float32 does not hold with its reciprocal: keep it between {SMALLEST:.2g} "
            f"and {LARGEST:.2g}",
        )


def _peel(arg: object) -> tuple[Node | None, float, bool]:
    """Read how a scale is prepared: (scale, factor, flipped) with `arg == factor * scale ** (-1 if flipped else 1)`.

    Only steps that are exact, or done in fp32 or better, are looked through.  A constant is computed as the graph
    does, step by step."""
    factor, flipped = 1.0, False
    passed: list[tuple[Node, float, bool]] = []
    while True:
        fixed = constant(arg)
        if fixed is not None:
            for step, times, flips in reversed(passed):
                fixed = _as_in(value(step).dtype, times * ((1.0 / fixed if fixed else math.inf) if flips else fixed))
            return None, fixed, False
        assert isinstance(arg, Node)
        peeled = _peel_one(arg)
        if peeled is None:
            return arg, factor, flipped
        operand, times, flips = peeled
        scaled = factor / times if flipped else factor * times
        if not _is_invertible(scaled):  # the graph multiplies in fp32: step by step it would be another
            return arg, factor, flipped
        passed.append((arg, times, flips))
        arg, factor = operand, scaled
        flipped ^= flips


def _as_in(dtype: torch.dtype, number: float) -> float:
    """A number as a tensor of this dtype holds it."""
    return float(torch.tensor(number, dtype=dtype, device="cpu"))


def _peel_one(node: Node) -> tuple[Node, float, bool] | None:
    """One step up: `node == times * operand ** (-1 if flips else 1)`; None where it must not be looked through."""
    if is_view(node) or calls(node, aten.expand.default):
        source = view_source(node)
        return None if source is None else (source, 1.0, False)
    if not is_tensor(node) or not value(node).dtype.is_floating_point or value(node).dtype.itemsize < 4:
        return None
    if calls(node, aten.reciprocal.default) or (calls(node, aten.pow.Tensor_Scalar) and number(node.args[1]) == -1.0):
        operand = tensor_node(node.args[0])
        return None if operand is None else (operand, 1.0, True)
    both = operands(node, *DIVISIONS, *MULTIPLICATIONS)
    if both is None:
        return None
    left, right = both
    for tensor, other, swapped in ((left, right, False), (right, left, True)):
        by, operand = constant(other), tensor_node(tensor)
        if by is None or operand is None or by == 0.0 or not math.isfinite(by):
            continue
        if calls(node, *MULTIPLICATIONS):
            return operand, by, False
        return operand, by if swapped else 1.0 / by, swapped
    return None


def _check_scale(node: Node, scale: Node, x: Node) -> None:
    if value(scale).device != value(x).device:
        raise Unread(
            node,
            f"the scale is on {value(scale).device} and the tensor on {value(x).device}: make the scale a buffer, "
            "so that .to(device) moves it",
        )
    root, _ = through_views(x)
    if depends_on(scale, root):
        raise Unread(node, "the scale is computed in the graph from the tensor itself: a dynamic quantisation")


def _opaque(call: OpCall, op: OpaqueOp) -> Quantize | None:
    """A quantisation by an op of the table."""
    dtype = value(call.output).dtype
    if dtype not in FP8_DTYPES or call.written != op.result:
        return None
    if said := op.unread(call.arguments, call.defaults):
        raise Unread(call.output, f"{call.name.replace('::', '.')} is called with {said}, which is not read")
    x = call.arguments[op.input]
    found = _one_op(call, x, call.arguments[op.scale], dtype, (-_limit(dtype), _limit(dtype)))
    if op.device is not None and value(found.input).device.type != op.device:
        raise Unread(call.output, f"{found.opaque} computes something else on {value(found.input).device.type}")
    given = tensor_node(x)
    if not call.whole or given is None or not same_shape(value(call.output).shape, value(given).shape):
        raise Unread(call.output, f"{found.opaque} writes to a part of a tensor, or to one of another shape")
    return replace(found, keeps_nan=op.keeps_nan)


def _read_quantized_decomposed(call: OpCall) -> Quantize | None:
    """`quantize_per_tensor(input, scale, zero_point, quant_min, quant_max, dtype)`."""
    name, given = call.name.replace("::", "."), call.arguments
    dtype = given["dtype"]
    if dtype not in FP8_DTYPES or not isinstance(dtype, torch.dtype):
        return None
    zero_point = constant(given["zero_point"])
    if zero_point != 0.0:
        shown = "not known" if zero_point is None else f"{zero_point:g}"
        raise Unread(call.output, f"the zero point of {name} is {shown}, not 0")
    low, high = constant(given["quant_min"]), constant(given["quant_max"])
    if low is None or high is None:
        raise Unread(call.output, f"the range of {name} is not constant")
    return replace(_one_op(call, given["input"], given["scale"], dtype, (low, high)), rounding="integer")


def _one_op(call: OpCall, x: object, scale: object, dtype: torch.dtype, clamp: tuple[float, float]) -> Quantize:
    """A Quantize that one op does: in fp32, by `scale`, clamped and cast."""
    node, name = call.output, call.name.replace("::", ".")
    if not isinstance(x, Node) or not is_high_precision(x):
        raise Unread(node, f"the input of {name} is not a high-precision tensor")
    chain = _Chain(node)
    chain.nodes |= call.nodes
    chain.low, chain.high = clamp
    chain.dtypes = {torch.float32}
    if not _is_scalar(scale):
        chain._refuse_scale(node, x, scale)
        raise Unread(node, f"the scale of {name} is as large as the tensor: not a static per-tensor quantisation")
    chain.scale, factor, flipped = _peel(scale)
    _check_number(node, factor)
    chain.inverse, chain.factor = flipped, 1.0 / factor if flipped else factor
    return replace(chain._finish(chain._widened(x)), dtype=dtype, opaque=name)


def _limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _divide(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _divide_in_fp32(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply_reciprocal(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale.reciprocal()).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply_one_over(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * (1 / scale)).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply(x: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * inv_scale).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply_from_left(x: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (inv_scale * x.float()).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _scale_as_number(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / 0.37).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _inverse_as_number(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * 2.5).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _scale_with_factor(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / (scale * 2.0)).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _scale_reshaped(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale.reshape(1, 1).expand(x.shape[0], 1)).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _clamp_max_first(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).clamp_max(_limit(dtype)).clamp_min(-_limit(dtype)).to(dtype)


def _minimum_maximum(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.full((), _limit(dtype), device=x.device)
    return torch.maximum(torch.minimum(x.float() / scale, limit), -limit).to(dtype)


def _hardtanh(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.hardtanh(x.float() / scale, -_limit(dtype), _limit(dtype)).to(dtype)


def _clamp_above_only(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).clamp(max=_limit(dtype)).to(dtype)


def _no_clamp(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).to(dtype)


def _rounded_before_the_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-_limit(dtype), _limit(dtype)).to(torch.bfloat16).to(dtype)


def _views_between(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = (x.float() / scale).reshape(-1, 2, x.shape[-1] // 2).clamp(-_limit(dtype), _limit(dtype))
    return y.transpose(0, 1).to(dtype)


def _to_whole_numbers(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).round().clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _cast_only(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "divide": _divide,
    "divide in fp32": _divide_in_fp32,
    "multiply by the reciprocal": _multiply_reciprocal,
    "multiply by one over the scale": _multiply_one_over,
    "multiply by an inverse scale": _multiply,
    "multiply from the left": _multiply_from_left,
    "scale as a number": _scale_as_number,
    "inverse scale as a number": _inverse_as_number,
    "scale with a factor": _scale_with_factor,
    "scale reshaped and expanded": _scale_reshaped,
    "clamp_max before clamp_min": _clamp_max_first,
    "minimum and maximum": _minimum_maximum,
    "hardtanh": _hardtanh,
    "clamp above only": _clamp_above_only,
    "no clamp": _no_clamp,
    "rounded to bf16 before the cast": _rounded_before_the_cast,
    "views between the steps": _views_between,
    "to whole numbers": _to_whole_numbers,
    "cast only": _cast_only,
}
"""What is read as a `Quantize`: (x [tokens, hidden], scale of one element, FP8 dtype) -> codes."""
