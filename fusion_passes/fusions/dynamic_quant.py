"""What several rules ask of a dynamic quantization, and how a fused op takes its bounds and gives its scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import Node

from fusion_passes.graph.match import Call, Match
from fusion_passes.graph.read import aten, value
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.quant import SMALLEST_SCALE, dtype_name, max_value

ROUNDING = 1e-6
"""Of a bound that is computed from constants."""


def check_dynamic(m: Match, q: GroupQuantize, x: Tensor) -> None:
    """Decline unless the scales are those of `quant.choose_scale` with some lower bound.

    x: tells the device."""
    limit = max_value(q.dtype)
    m.require(
        q.clamp in (None, (-limit, limit)),
        f"the graph clamps to {q.clamp}, the fused op to the range of {dtype_name(q.dtype)}, ±{limit:g}",
    )
    m.require(
        q.clamp is not None or q.min_scale >= SMALLEST_SCALE or (x.is_cuda and q.dtype is torch.float8_e4m3fn),
        f"without a clamp, and with scales down to {q.min_scale:g}, quotients can be too large; what a cast to "
        f"{dtype_name(q.dtype)} makes of them depends on the torch version on {x.device.type}, the fused op "
        "saturates: clamp before the cast",
    )
    m.require(
        0.0 <= q.min_scale < math.inf,
        f"the lower bound of the scales is {q.min_scale:g}; the fused op takes a finite number, 0 or more",
    )
    m.require(
        not q.inverse or q.min_scale >= SMALLEST_SCALE * (1.0 - ROUNDING),
        f"the graph multiplies by the reciprocal of scales down to {q.min_scale:g}, which can be infinite: divide "
        f"by the scales, or give them a lower bound of {SMALLEST_SCALE:.3g} or more",
    )
    if q.scales is not None:
        dtype = value(q.scales).dtype
        m.require(dtype is torch.float32, f"the scales are {dtype_name(dtype)}, in the fused op float32")
        unknown = [size for size in value(q.scales).shape if not isinstance(size, int)]
        m.require(len(unknown) <= 1, f"several sizes of the scales, {unknown}, are symbolic")


def lower_bound(q: GroupQuantize) -> float | None:
    """The lower bound of the scales as an argument of an op; the default where it is that, but for the rounding of
    constants."""
    return None if math.isclose(q.min_scale, SMALLEST_SCALE, rel_tol=ROUNDING) else q.min_scale


def upper_bound(q: GroupQuantize) -> float | None:
    """The upper bound of the scales as an argument of an op."""
    return None if q.max_scale == math.inf else q.max_scale


def scales_of(q: GroupQuantize, scales: Node, call: Call) -> Node:
    """The scales that a fused op gives in the shape of the graph's."""
    assert q.scales is not None
    shape = [size if isinstance(size, int) else -1 for size in value(q.scales).shape]
    return call(aten.reshape.default, scales, shape)
