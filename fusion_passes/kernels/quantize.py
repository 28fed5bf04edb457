"""FP8 quantization in Triton, as one kernel: by a scale that is given, or by the largest magnitude of each group."""

import triton
import triton.language as tl
from torch import Tensor

from fusion_passes.kernels.fp8 import quantized
from fusion_passes.quant import SMALLEST_SCALE, max_value

BLOCK = 2048
"""Elements of a program."""


@triton.jit
def _by_scale(out, x, scale, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = quantized(tl.load(x + at, mask=at < count), tl.load(scale), out.dtype.element_ty)
    tl.store(out + at, codes, mask=at < count)


@triton.jit
def _by_group(
    out, scales, x, groups, largest_scale,
    SIZE: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    at, inside = row[:, None] * SIZE + column, (row[:, None] < groups) & (column < SIZE)
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.max(tl.abs(y), 1)
    magnitude = tl.where(tl.max((y != y).to(tl.int32), 1) > 0, float("nan"), magnitude)
    scale = tl.maximum(tl.div_rn(magnitude, LIMIT), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.minimum(scale, largest_scale, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, quantized(y, scale[:, None], out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < groups)


def by_scale(x: Tensor, scale: Tensor, out: Tensor) -> None:
    """`saturate(x / scale)` to out, element by element as they lie in memory: x and out fill theirs, in one order.

    scale: fp32, one element, on the device."""
    if x.numel():
        _by_scale[(triton.cdiv(x.numel(), BLOCK),)](out, x, scale, x.numel(), BLOCK)


def by_group(
    x: Tensor, size: int, out: Tensor, scales: Tensor, largest_scale: float, smallest_scale: float = SMALLEST_SCALE
) -> None:
    """Codes and scales of `size` neighbours each, as `quant.choose_scale` has them; all contiguous."""
    if x.numel() == 0:
        return
    columns = triton.next_power_of_2(size)
    rows = max(1, BLOCK // columns)
    groups = scales.numel()
    _by_group[(triton.cdiv(groups, rows),)](
        *(out, scales, x, groups, largest_scale),
        SIZE=size,
        LIMIT=max_value(out.dtype),
        SMALLEST=smallest_scale,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4 if rows * columns <= 4096 else 8,
    )
