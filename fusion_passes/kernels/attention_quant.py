"""Attention with FP8 output in plain Triton: every shape, stride and mask that the operator allows, on any FP8 GPU.

One program computes BLOCK_M query rows of one head with an online softmax. Key blocks that every row sees whole run in
a loop without bounds; the diagonal and the end of the keys run in a second one. The quantization is the epilogue.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_passes.kernels.fp8 import to_fp8

LOG2_E = tl.constexpr(1.4426950408889634)
# The running maximum starts at the lowest finite number, not at -inf: a masked score minus it is then -inf and never
# NaN, a row that sees nothing ends with a sum of 0, and scores at the lowest number itself still average as in torch.
LOWEST = tl.constexpr(-3.4028234663852886e38)
NO_MASK = tl.constexpr(0)
BOOL_MASK = tl.constexpr(1)
ADDED_MASK = tl.constexpr(2)


@triton.jit
def _key_blocks(
    acc,
    row_sum,
    row_max,
    q,
    k_tile,
    v_tile,
    mask_tile,
    rows,
    start,
    end,
    q_len,
    kv_len,
    k_stride,
    v_stride,
    mask_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    NATURAL: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Online softmax over the key blocks in [start, end); EDGE: they may reach past the diagonal or the last key."""
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for n in range(start, end, BLOCK_N):
        at = tl.cast(n, tl.int64)
        if EDGE:
            inside = cols < kv_len - n
            k = tl.load(k_tile + at * k_stride, mask=inside[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_tile + at * k_stride, mask=(dims < HEAD_DIM)[:, None], other=0.0)
        else:
            k = tl.load(k_tile + at * k_stride)
        scores = tl.dot(q, k)  # [BLOCK_M, BLOCK_N]
        if NATURAL:
            scores *= scale
        if MASK != NO_MASK:
            # Rows past the last query read nothing and stay unmasked: they are not stored.
            present = (rows < q_len)[:, None]
            if EDGE:
                present = present & inside[None, :]
            if MASK == BOOL_MASK:
                keep = tl.load(mask_tile + at * mask_stride, mask=present, other=1)
                scores = tl.where(keep != 0, scores, float("-inf"))
            else:
                scores += tl.load(mask_tile + at * mask_stride, mask=present, other=0.0).to(tl.float32)
        if EDGE:
            visible = inside[None, :]
            if CAUSAL:
                visible = visible & (rows[:, None] >= n + cols[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        if NATURAL:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            p = tl.exp2((scores - new_max[:, None]) * LOG2_E)
            alpha = tl.exp2((row_max - new_max) * LOG2_E)
        else:  # one multiply-add; scale holds log2(e), and is positive
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - new_max[:, None])
            alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if EDGE:  # zero rows past the end: 0 * NaN would be NaN
            v = tl.load(v_tile + at * v_stride, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            v = tl.load(v_tile + at * v_stride, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_tile + at * v_stride)
        acc = tl.dot(p.to(v.dtype), v, acc)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["heads", "group", "q_len", "kv_len", "row_blocks"])
def _attention_quant(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_scale_ptr,
    out_b, out_h, out_s,
    q_b, q_h, q_s,
    k_b, k_h, k_s,
    v_b, v_h, v_s,
    mask_b, mask_h, mask_q, mask_k,
    heads,
    group,
    q_len,
    kv_len,
    row_blocks,
    scale,
    out_scale_factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    NATURAL: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    # Heads of one KV head run side by side and share its keys in the L2; the longest rows of a causal mask go first.
    batch_heads = tl.num_programs(0) // row_blocks
    block = tl.program_id(0) // batch_heads
    batch_head = tl.program_id(0) % batch_heads
    if CAUSAL:
        block = row_blocks - 1 - block
    b = (batch_head // heads).to(tl.int64)
    h = (batch_head % heads).to(tl.int64)
    first_row = block * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    # 64-bit offsets: a tensor can hold more than 2**31 elements, and a few rows can span that.
    long_rows = rows.to(tl.int64)
    long_cols = cols.to(tl.int64)
    own = (rows < q_len)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + b * q_b + h * q_h + long_rows[:, None] * q_s + dims[None, :], mask=own, other=0.0)
    k_tile = k_ptr + b * k_b + (h // group) * k_h + long_cols[None, :] * k_s + dims[:, None]
    v_tile = v_ptr + b * v_b + (h // group) * v_h + long_cols[:, None] * v_s + dims[None, :]
    mask_tile = mask_ptr
    if MASK != NO_MASK:
        mask_tile = mask_ptr + b * mask_b + h * mask_h + long_rows[:, None] * mask_q + long_cols[None, :] * mask_k

    end = kv_len
    whole = kv_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(kv_len, first_row + BLOCK_M)
        whole = tl.minimum(whole, (first_row + 1) // BLOCK_N * BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    acc, row_sum, row_max = _key_blocks(
        acc, row_sum, row_max, q, k_tile, v_tile, mask_tile, rows, 0, whole, q_len, kv_len, k_s, v_s, mask_k, scale,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, MASK, NATURAL, False,
    )  # fmt: skip
    acc, row_sum, row_max = _key_blocks(
        acc, row_sum, row_max, q, k_tile, v_tile, mask_tile, rows, whole, end, q_len, kv_len, k_s, v_s, mask_k, scale,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, MASK, NATURAL, True,
    )  # fmt: skip

    out_scale = out_scale_factor
    if out_scale_ptr is not None:
        out_scale = tl.load(out_scale_ptr) * out_scale_factor
    factor = out_scale if INVERSE else 1.0 / out_scale
    acc = acc * (factor / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    out = out_ptr + b * out_b + h * out_h + long_rows[:, None] * out_s + dims[None, :]
    tl.store(out, to_fp8(acc, out_ptr.dtype.element_ty), mask=own)


def launch(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    output_scale: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    output_scale_factor: float,
    output_scale_inverse: bool,
    config: tuple[int, int, int, int] | None = None,
) -> None:
    """Write the FP8 attention output into `out`. Arguments as in `fusion_passes.ops.attention_quant`, validated.

    CPU tensors work in Triton's interpreter. config: (BLOCK_M, BLOCK_N, num_warps, num_stages), by shape if None.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    block_d = triton.next_power_of_2(head_dim)
    block_m, block_n, num_warps, num_stages = config or _config(block_d, q_len, attn_mask, query.device)
    mask, mask_kind, mask_strides = None, NO_MASK, (0, 0, 0, 0)
    if attn_mask is not None:
        mask_kind = BOOL_MASK if attn_mask.dtype is torch.bool else ADDED_MASK
        mask = attn_mask.expand(batch, heads, q_len, kv_len)
        mask_strides = mask.stride()
        mask = mask.view(torch.uint8) if mask_kind is BOOL_MASK else mask
    # Added masks need the scores in their own unit, where their lowest number does not overflow; and a maximum times
    # the scale is the maximum of the products only for a positive scale.
    natural = mask_kind is ADDED_MASK or not scale > 0.0
    row_blocks = triton.cdiv(q_len, block_m)
    _attention_quant[(row_blocks * batch * heads,)](
        out,
        query,
        key,
        value,
        mask,
        output_scale,
        *out.stride()[:3],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *mask_strides,
        heads,
        heads // key.shape[1],
        q_len,
        kv_len,
        row_blocks,
        scale if natural else scale * LOG2_E.value,
        output_scale_factor,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CAUSAL=is_causal,
        MASK=mask_kind,
        NATURAL=natural,
        INVERSE=output_scale_inverse,
        num_warps=num_warps,
        num_stages=num_stages,
    )


# (BLOCK_M, BLOCK_N, num_warps, num_stages) by padded head size, best first: the first that fits is taken.
SHORT = {
    64: [(64, 32, 4, 3)],
    128: [(64, 32, 4, 3), (64, 32, 4, 2)],
    256: [(128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
}
LONG = {
    64: [(128, 64, 4, 3), (64, 32, 4, 3)],
    128: [(128, 128, 8, 3), (128, 64, 4, 2), (64, 32, 4, 2)],
    256: [(128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
}


def _config(block_d: int, q_len: int, mask: Tensor | None, device: torch.device) -> tuple[int, int, int, int]:
    configs = (SHORT if q_len <= 1024 else LONG)[block_d]
    room = _shared_memory(device)
    mask_bytes = 0 if mask is None else mask.element_size()
    for block_m, block_n, num_warps, num_stages in configs:
        # Q, K and V for each stage of the pipeline, the mask for all stages but one: what Triton 3.6 allocates.
        tiles = 2 * block_d * (block_m + 2 * num_stages * block_n)
        if tiles + (num_stages - 1) * mask_bytes * block_m * block_n <= room:
            return block_m, block_n, num_warps, num_stages
    return configs[-1]


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block can have."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
