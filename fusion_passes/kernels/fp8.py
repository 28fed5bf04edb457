"""FP8 rounding on the device, for all kernels in Triton."""

import triton
import triton.language as tl


@triton.jit
def to_fp8(x, dtype: tl.constexpr):
    """fp32 x as FP8: what overflows saturates, NaN stays NaN."""
    tl.static_assert(dtype == tl.float8e4nv or dtype == tl.float8e5)
    LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def quantized(x, scale, dtype: tl.constexpr):
    """Codes by rounded division, as plain torch has them."""
    return to_fp8(tl.div_rn(x.to(tl.float32), scale), dtype)
