"""What the kernels of paged attention share on the device: scales, the look-up of pages, the output."""

import triton
import triton.language as tl

from fusion_passes.kernels.fp8 import to_fp8

LOG2_E = tl.constexpr(1.4426950408889634)
# The running maximum starts at the lowest finite number, not at -inf: a masked logit minus it is then -inf and never
# NaN, and a row that sees nothing ends with a sum of 0.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def scale_or_one(scale_ptr):
    """The value of a scale, of which None is 1."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    return scale


@triton.jit
def page_of(table_ptr, key, columns, pages, PAGE: tl.constexpr):
    """The page (int64) of a key or of a tensor of keys. Outside the table or the cache it is the nearest one."""
    page = tl.load(table_ptr + tl.minimum(key // PAGE, columns - 1))
    return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_rows(
    out_ptr, out_scales_ptr, output_scale_ptr, x, row, own,
    HEAD_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
):  # fmt: skip
    """Rows of attention, fp32 [ROWS, HEAD_DIM], to rows `row` (int64, token * heads + head) of a contiguous output.

    out_ptr: bf16, fp16, or FP8 by output_scale (None: 1) or, with out_scales_ptr, by a scale for each GROUP_SIZE
    neighbours, SMALLEST_SCALE or more, which goes to fp32 [tokens * heads, HEAD_DIM / GROUP_SIZE]. own: bool [ROWS],
    the rows to write.
    """
    dims = tl.arange(0, HEAD_DIM)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if out_scales_ptr is not None:
        LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
        GROUPS: tl.constexpr = HEAD_DIM // GROUP_SIZE
        grouped = x.reshape([x.shape[0], GROUPS, GROUP_SIZE])
        scale = tl.reduce(tl.abs(grouped), 2, _larger) / LIMIT  # [ROWS, GROUPS]
        scale = tl.maximum(scale, SMALLEST_SCALE, propagate_nan=tl.PropagateNan.ALL)
        x = (grouped / scale[:, :, None]).reshape([x.shape[0], HEAD_DIM])
        at = row[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        tl.store(out_scales_ptr + at, scale, mask=own[:, None])
    elif dtype.is_fp8():
        # Not `quantized`: what is divided is itself rounded in another order than elsewhere, and `/` is faster.
        x = x / scale_or_one(output_scale_ptr)
    if dtype.is_fp8():
        y = to_fp8(x, dtype)
    else:
        y = x.to(dtype)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + dims[None, :], y, mask=own[:, None])
