"""RMSNorm and FP8 quantization in Triton, as one kernel: by a scale that is given, or by the largest magnitude of each
group.  A program holds whole rows, so that x is read once; all is computed in fp32 and rounded once, to FP8."""

import triton
import triton.language as tl
from torch import Tensor

from fusion_passes.kernels.fp8 import quantized, to_fp8
from fusion_passes.quant import max_value

BLOCK = 2048
"""Elements that a program holds at least, where there are as many."""


@triton.jit
def _normalized(x, weight, row, stride, rows, eps, offset, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows in fp32, 0 outside of them: [ROWS, COLUMNS]."""
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < SIZE)
    y = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    root = tl.sqrt_rn(tl.sum(y * y, 1) / SIZE + eps)
    y *= tl.div_rn(1.0, root)[:, None]
    if weight is not None:
        y *= (tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32) + offset)[None, :]
    return y


@triton.jit
def _by_scale(
    out, x, weight, scale, stride, rows, eps, offset, factor,
    INVERSE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    y = _normalized(x, weight, row, stride, rows, eps, offset, SIZE, COLUMNS)
    by = factor if scale is None else tl.load(scale) * factor
    codes = to_fp8(y * by, out.dtype.element_ty) if INVERSE else quantized(y, by, out.dtype.element_ty)
    tl.store(out + row[:, None] * SIZE + column, codes, mask=(row[:, None] < rows) & (column < SIZE))


@triton.jit
def _by_group(
    out, scales, x, weight, stride, rows, eps, offset, smallest_scale, largest_scale,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = COLUMNS // GROUP
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    y = _normalized(x, weight, row, stride, rows, eps, offset, SIZE, COLUMNS)
    y = tl.reshape(y, (ROWS, GROUPS, GROUP))
    magnitude = tl.max(tl.abs(y), 2)
    magnitude = tl.where(tl.max((y != y).to(tl.int32), 2) > 0, float("nan"), magnitude)
    scale = tl.maximum(tl.div_rn(magnitude, LIMIT), smallest_scale, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.minimum(scale, largest_scale, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.reshape(quantized(y, scale[:, :, None], out.dtype.element_ty), (ROWS, COLUMNS))
    tl.store(out + row[:, None] * SIZE + column, codes, mask=(row[:, None] < rows) & (column < SIZE))
    group, count = tl.arange(0, GROUPS)[None, :], tl.cdiv(SIZE, GROUP)
    tl.store(scales + row[:, None] * count + group, scale, mask=(row[:, None] < rows) & (group < count))


def by_scale(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, out: Tensor, *,
    eps: float, weight_offset: float, factor: float, inverse: bool,
) -> None:  # fmt: skip
    """Codes of the normalised rows of x [rows, size], whose last dimension is contiguous, divided by `scale * factor`,
    or times that with inverse, to out, which is contiguous.

    weight: [size], contiguous; None: 1.  scale: fp32, one element; None: 1."""
    rows, size = x.shape
    options = _blocks(rows, size)
    _by_scale[(triton.cdiv(rows, options["ROWS"]),)](
        *(out, x, weight, scale, x.stride(0), rows, eps, weight_offset, factor), INVERSE=inverse, SIZE=size, **options
    )


def by_group(
    x: Tensor, weight: Tensor | None, group_size: int, out: Tensor, scales: Tensor, *,
    eps: float, weight_offset: float, smallest_scale: float, largest_scale: float,
) -> None:  # fmt: skip
    """Codes and scales of the normalised rows of x, which are as for `by_scale`; scales [rows, groups] is contiguous.

    group_size: the size of a row, or a power of two that divides it."""
    rows, size = x.shape
    options = _blocks(rows, size)
    _by_group[(triton.cdiv(rows, options["ROWS"]),)](
        *(out, scales, x, weight, x.stride(0), rows, eps, weight_offset, smallest_scale, largest_scale),
        LIMIT=max_value(out.dtype),
        SIZE=size,
        GROUP=options["COLUMNS"] if group_size == size else group_size,
        **options,
    )


def _blocks(rows: int, size: int) -> dict[str, int]:
    columns = triton.next_power_of_2(size)
    held = max(1, min(BLOCK // columns, triton.next_power_of_2(rows)))
    return {"ROWS": held, "COLUMNS": columns, "num_warps": max(4, min(16, held * columns // 512))}
