"""Quantize: static per-tensor FP8 quantization, `cast(clamp(x / scale))`.

Read upwards from the cast to FP8: `(cast | clamp | round | view)* scaled? (exact cast | view)*`, where the scale has
one element.  A cast alone is a quantization with scale 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes.graph.arguments import operands, tensor_node
from fusion_passes.graph.functional import OpCall, op_call
from fusion_passes.graph.read import (
    CASTS,
    calls,
    has_one_element,
    is_high_precision,
    is_tensor,
    same_shape,
    value,
)
from fusion_passes.graph.steps import (
    DIVISIONS,
    LARGEST,
    MULTIPLICATIONS,
    SMALLEST,
    Cast,
    Clamp,
    ExactCast,
    Round,
    RoundingCast,
    Step,
    View,
    clamped_before,
    constant,
    is_cast,
    is_invertible,
    is_scalar,
    scalar,
    top,
    up,
    views_among,
)
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.opaque import OPAQUE, OpaqueOp
from fusion_passes.idioms.reading import Unread, depends_on, read_all, shape_of, show
from fusion_passes.quant import FP8_DTYPES, dtype_name, max_value

QUANTIZED_DECOMPOSED = "quantized_decomposed::quantize_per_tensor"
"""Rounds to whole numbers, also for FP8.  Inductor knows this op, so it is not among the opaque ones."""


@dataclass(frozen=True, eq=False)
class Quantize(Idiom):
    """`output = views(cast(clamp(round(input / (scale * scale_factor)))))`.

    input: the high-precision tensor before any cast of the quantization.
    scale: a tensor of one element (any rank, any float dtype), or None where the scale is the number `scale_factor`.
        Scalar steps that only prepare it are read: `1 / s` becomes `s` with the other `inverse`, `s * 2` becomes
        `scale_factor`, views fall away.  So `x * (1 / s)` is read as a division by s,
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
                raise ValueError("this quantization has a scale tensor: give its value")
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
    """Every static per-tensor FP8 quantization of the graph, and what only looks like one.  Never raises.

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
    return _read_chain(node, source) if is_high_precision(source) else None  # that is, from another FP8 dtype


def _read_chain(output: Node, source: Node) -> Quantize:
    """From the cast to FP8 up: `(cast | clamp | round | view)* scaled? (exact cast | view)*`."""
    behind = up(source, Cast, Clamp, Round, View)
    scaled = _scaled(top(behind, source))
    if scaled is None:
        return _quantize(output, source, _without_producer(behind))
    return _quantize(output, source, [*behind, scaled], _widened(scaled.operand))


@dataclass(frozen=True, eq=False)
class _Scaled(Step):
    """The operand over `factor * scale`, or times that where it is inverse; without a scale, the factor alone."""

    scale: Node | None
    factor: float
    inverse: bool


def _without_producer(steps: list[Step]) -> list[Step]:
    """Of a chain without a scale, what belongs to the quantization: a rounding cast with nothing of it before, no clamp
    and no rounding to whole numbers, is the producer's own."""
    own = 1 + max((i for i, taken in enumerate(steps) if isinstance(taken, (Clamp, Round))), default=-1)
    return _without_last_views([*steps[:own], *takewhile(lambda s: not isinstance(s, RoundingCast), steps[own:])])


def _without_last_views(steps: list[Step]) -> list[Step]:
    """The steps without the views above them, which are the producer's too."""
    while steps and isinstance(steps[-1], View):
        steps = steps[:-1]
    return steps


def _widened(x: Node) -> list[Step]:
    """What leads to the tensor that is scaled: exact casts, and views between them."""
    steps = up(x, ExactCast, View)
    above = top(steps, x)
    both = operands(above, *DIVISIONS, *MULTIPLICATIONS)
    if both is not None and is_scalar(both[0]) != is_scalar(both[1]):
        x, by = both if is_scalar(both[1]) else both[::-1]
        if not _is_made_of(by, x):  # as the factor of a norm is, which has one element where there is one token
            raise Unread(above, f"scaled twice: {above.name} scales the tensor before the quantization does")
    return _without_last_views(steps)


def _scaled(node: Node) -> _Scaled | None:
    """A division or multiplication by a scale; None for anything else."""
    both = operands(node, *DIVISIONS, *MULTIPLICATIONS)
    if both is None or not is_tensor(node):
        return None
    x, by = both
    divides = calls(node, *DIVISIONS)
    if not divides and is_scalar(x) and not is_scalar(by):
        x, by = by, x
    if not isinstance(x, Node) or not is_high_precision(x):
        return None  # a number divided by a tensor
    if not is_scalar(by):
        _refuse_scale(node, x, by)
        return None
    if not same_shape(value(node).shape, value(x).shape):
        raise Unread(node, f"the scale's shape broadcasts the tensor from {shape_of(x)} to {shape_of(node)}")
    return _scaled_by(node, x, by, divides)


def _scaled_by(node: Node, x: Node, by: object, divides: bool) -> _Scaled:
    """`node` is x over, or times, what is a number or has one element."""
    scale, factor, inverse = scalar(by)
    # A scale, or a factor of one, is a number that may as well be its reciprocal: Inductor multiplies where the graph
    # divides by a number.
    if not is_invertible(factor):
        raise Unread(
            node,
            f"the scale is {factor:g}, which float32 does not hold with its reciprocal: keep it between {SMALLEST:.2g} "
            f"and {LARGEST:.2g}",
        )
    return _Scaled(node, x, scale, 1.0 / factor if inverse else factor, divides == inverse)


def _refuse_scale(node: Node, x: Node, by: object) -> None:
    """Say why an operand is no scale, unless this is the product or quotient of two whole tensors."""
    scale = scalar(by).tensor if is_tensor(by) else by
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
    raise Unread(node, f"scale has shape {shape_of(scale)}: a {kind} quantization, not a static per-tensor one")


def _quantize(output: Node, source: Node, chain: list[Step], widened: Sequence[Step] = ()) -> Quantize:
    """The idiom of the steps that lead to `source`, the last one first: of the quantization itself, the scaling among
    them, then those that widen its input."""
    steps = [*chain, *widened]
    clamp = _bounds(chain)
    x = top(steps, source)
    if not is_high_precision(x):
        raise Unread(x, f"quantizes {x.name}, which is not a high-precision floating-point tensor")
    scaled = next((taken for taken in chain if isinstance(taken, _Scaled)), _Scaled(output, x, None, 1.0, False))
    if scaled.scale is not None:
        _check_scale(output, scaled.scale, x)
    return Quantize(
        output=output,
        nodes=frozenset({output, *(taken.node for taken in steps)}),
        input=x,
        scale=scaled.scale,
        scale_factor=scaled.factor,
        inverse=scaled.inverse,
        dtype=value(output).dtype,
        clamp=None if clamp == (-math.inf, math.inf) else clamp,
        compute_dtype=_compute_dtype(output, x, chain),
        rounding="integer" if any(isinstance(taken, Round) for taken in chain) else "cast",
        views=views_among(steps),
    )


def _bounds(steps: list[Step]) -> tuple[float, float]:
    """The bounds of all clamps of a chain together, the last step first."""
    bounds, rounds = (-math.inf, math.inf), False
    for taken in steps:
        rounds |= isinstance(taken, Round)
        if isinstance(taken, Clamp):
            bounds = clamped_before(bounds, *_constant_bounds(taken, rounds))
    return bounds


def _constant_bounds(clamp: Clamp, rounds: bool) -> tuple[float, float]:
    """The bounds of one clamp.  rounds: a rounding to whole numbers comes behind it."""
    node = clamp.node
    if clamp.broadcasts:
        raise Unread(node, f"a bound broadcasts the tensor from {shape_of(clamp.operand)} to {shape_of(node)}")
    if clamp.bounds is None:
        unknown = next(x for x in (clamp.low, clamp.high) if x is not None and constant(x) is None)
        raise Unread(node, f"clamps to {show(unknown)}, which is not a constant")
    for limit in clamp.bounds:
        if math.isnan(limit):
            raise Unread(node, "clamps to nan, which makes every code NaN")
        if rounds and math.isfinite(limit) and limit != math.trunc(limit):
            raise Unread(node, f"clamps to {limit:g}, which is no whole number, before it rounds to whole numbers")
    return clamp.bounds


def _compute_dtype(output: Node, x: Node, chain: list[Step]) -> torch.dtype:
    """The narrowest dtype that a step of the quantization gives."""
    dtypes = {value(taken.node).dtype for taken in chain if not isinstance(taken, View)} or {value(x).dtype}
    if {torch.float16, torch.bfloat16} <= dtypes:
        raise Unread(output, "the quotient is rounded to float16 and to bfloat16")
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def _check_scale(node: Node, scale: Node, x: Node) -> None:
    if value(scale).device != value(x).device:
        raise Unread(
            node,
            f"the scale is on {value(scale).device} and the tensor on {value(x).device}: make the scale a buffer, "
            "so that .to(device) moves it",
        )
    if _is_made_of(scale, x):
        raise Unread(node, "the scale is computed in the graph from the tensor itself: a dynamic quantization")


def _is_made_of(scale: object, x: object) -> bool:
    """True where a scale is computed in the graph from the tensor itself."""
    return isinstance(scale, Node) and isinstance(x, Node) and depends_on(scale, top(up(x, Cast, View), x))


def _opaque(call: OpCall, op: OpaqueOp) -> Quantize | None:
    """A quantization by an op of the table."""
    dtype = value(call.output).dtype
    if dtype not in FP8_DTYPES or call.written != op.result:
        return None
    if said := op.unread(call.arguments, call.defaults):
        raise Unread(call.output, f"{call.name.replace('::', '.')} is called with {said}, which is not read")
    x = call.arguments[op.input]
    found = _one_op(call, x, call.arguments[op.scale])
    if op.device is not None and value(found.input).device.type != op.device:
        raise Unread(call.output, f"{found.opaque} computes something else on {value(found.input).device.type}")
    given = tensor_node(x)
    if not call.whole or given is None or not same_shape(value(call.output).shape, value(given).shape):
        raise Unread(call.output, f"{found.opaque} writes to a part of a tensor, or to one of another shape")
    return replace(found, clamp=(-max_value(dtype), max_value(dtype)), keeps_nan=op.keeps_nan)


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
    return replace(_one_op(call, given["input"], given["scale"]), dtype=dtype, clamp=(low, high), rounding="integer")


def _one_op(call: OpCall, x: object, scale: object) -> Quantize:
    """A Quantize that one op does in fp32, by `scale`."""
    node, name = call.output, call.name.replace("::", ".")
    if not isinstance(x, Node) or not is_high_precision(x):
        raise Unread(node, f"the input of {name} is not a high-precision tensor")
    if not is_scalar(scale):
        _refuse_scale(node, x, scale)
        raise Unread(node, f"the scale of {name} is as large as the tensor: not a static per-tensor quantization")
    found = _quantize(node, x, [_scaled_by(node, x, scale, divides=True)], _widened(x))
    return replace(found, nodes=found.nodes | call.nodes, compute_dtype=torch.float32, opaque=name)
