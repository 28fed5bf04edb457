"""What several rules ask of a static quantization."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fusion_passes.graph.match import Match
from fusion_passes.graph.read import value
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.quant import dtype_name, max_value


def check_static(m: Match, q: Quantize, query: Tensor, dtypes: Collection[torch.dtype]) -> None:
    """Decline unless the quantization is what a kernel does that divides by one fp32 scale and saturates.

    query: tells the device.  dtypes: that the fused op can give."""
    m.require(
        q.rounding == "cast",
        f"{q.opaque or 'the quantization'} rounds to whole numbers before the cast; the fused op does not",
    )
    m.require(
        q.dtype in dtypes,
        f"the graph quantizes to {dtype_name(q.dtype)}, the fused op to {' or '.join(map(dtype_name, dtypes))}",
    )
    m.require(
        q.compute_dtype.itemsize > 1,
        f"the graph rounds to {dtype_name(q.compute_dtype)} before it quantizes; the fused op does not",
    )
    limit = max_value(q.dtype)
    m.require(
        q.clamp in (None, (-limit, limit)),
        f"the graph clamps to {q.clamp}, the fused op to the range of {dtype_name(q.dtype)}, ±{limit:g}",
    )
    m.require(
        q.clamp is not None or (query.is_cuda and q.dtype is torch.float8_e4m3fn),
        f"without a clamp, what a cast to {dtype_name(q.dtype)} makes of values that are too large depends on the "
        f"torch version on {query.device.type}; the fused op saturates: clamp before the cast",
    )
    m.require(q.keeps_nan, f"{q.opaque} makes the largest code of NaN; the fused op keeps NaN")
    if q.scale is not None:
        scale = value(q.scale)
        m.require(scale.dtype is torch.float32, f"the scale is {dtype_name(scale.dtype)}; make it float32")
