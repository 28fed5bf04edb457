"""Paged attention for sequences with many new tokens, in plain Triton: prefill, chunked prefill, mixed batches.

One program computes BLOCK_M query rows of one key head with an online softmax; a row is one query head of the group of
one token, so that short sequences fill a tile as well. A batch has at most tokens * group / BLOCK_M + seqs such blocks,
which is known without its lengths; each program finds its own sequence on the device.

An FP8 query meets FP8 keys in the FP8 matrix unit. Its partner in the product with V is fp16, to which FP8 converts
exactly: Hopper's FP8 unit takes no V with head_dim innermost, and keeps few bits of a long sum.

On Hopper `launch` hands over to the faster `paged_prefill_sm90` what that can do.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_passes.kernels.fp8 import quantized, to_fp8
from fusion_passes.kernels.paged import LOG2_E, LOWEST, page_of, scale_or_one, store_rows
from fusion_passes.quant import FP8_DTYPES, SMALLEST_SCALE

SEARCHED = tl.constexpr(128)  # sequences looked at in one step of the search for a block's own


@triton.jit
def _sequence_of(block, query_start_ptr, seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence that a block belongs to, and the first block of that sequence.

    Sequence s starts with block query_start[s] * GROUP // BLOCK_M + s: no two share one, and none has too few.
    """
    seq = -1
    for i in range(0, seqs, SEARCHED):
        s = i + tl.arange(0, SEARCHED)
        start = tl.load(query_start_ptr + s, mask=s < seqs, other=0)
        begun = (s < seqs) & (start * GROUP // BLOCK_M + s <= block)
        seq += tl.sum(begun.to(tl.int32), 0)
    seq = tl.maximum(seq, 0)
    return seq, tl.load(query_start_ptr + seq) * GROUP // BLOCK_M + seq


@triton.jit
def _key_blocks(
    acc,
    row_sum,
    row_max,
    q,
    position,
    factor,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    end,
    first_key,
    last_key,
    columns,
    pages,
    k_page,
    k_key,
    v_page,
    v_key,
    window,
    softcap,
    p_factor,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROUND_P: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Online softmax over the key blocks in [start, end). EDGE: some row sees a part of them only.

    factor: of a logit, [BLOCK_M, 1] or a number, positive; with log2(e), or 1 / softcap, in it.
    """
    dims = tl.arange(0, HEAD_DIM)
    cols = tl.arange(0, BLOCK_N)
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    VALUE: tl.constexpr = v_ptr.dtype.element_ty
    P: tl.constexpr = tl.float16 if VALUE.is_fp8() else VALUE
    # 64-bit offsets: a cache can hold more than 2**31 elements, and so can one page.
    long_cols = cols.to(tl.int64)
    k_cols = (long_cols * k_key)[:, None] + dims[None, :]
    v_cols = (long_cols * v_key)[:, None] + dims[None, :]
    # The next block's page is looked up one block ahead, so that its latency is hidden.
    if ONE_PAGE:
        page = page_of(table_ptr, start, columns, pages, PAGE)
    else:
        page = page_of(table_ptr, start + cols, columns, pages, PAGE)
    for n in tl.range(start, end, BLOCK_N):
        if ONE_PAGE:
            slot = tl.cast(n % PAGE, tl.int64)
            k_tile = k_ptr + (page * k_page + slot * k_key) + k_cols
            v_tile = v_ptr + (page * v_page + slot * v_key) + v_cols
            page = page_of(table_ptr, n + BLOCK_N, columns, pages, PAGE)
        else:
            slot = ((n + cols) % PAGE).to(tl.int64)
            k_tile = k_ptr + (page * k_page + slot * k_key)[:, None] + dims[None, :]
            v_tile = v_ptr + (page * v_page + slot * v_key)[:, None] + dims[None, :]
            page = page_of(table_ptr, n + BLOCK_N + cols, columns, pages, PAGE)
        k = tl.load(k_tile)
        logits = tl.dot(q, tl.trans(k.to(q.dtype)))  # [BLOCK_M, BLOCK_N]
        key = n + cols
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            e = tl.exp2(logits * factor * (2.0 * LOG2_E))
            logits = (1.0 - 2.0 / (e + 1.0)) * (softcap * LOG2_E)
        if EDGE:
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        if SOFTCAP:
            new_max = tl.maximum(row_max, tl.max(logits, 1))
            p = tl.exp2(logits - new_max[:, None])
        else:  # one multiply-add
            new_max = tl.maximum(row_max, tl.max(logits * factor, 1))
            p = tl.exp2(logits * factor - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        acc = acc * alpha[:, None]
        if EDGE:  # zeros where no row sees a key, which may hold NaN: 0 * NaN would be NaN
            v = tl.load(v_tile, mask=((key >= first_key) & (key < last_key))[:, None], other=0.0)
        else:
            v = tl.load(v_tile)
        if ROUND_P:
            p = to_fp8(p * p_factor, VALUE)
        acc = tl.dot(p.to(P), v.to(P), acc)
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["table_seq", "tokens", "kv_heads", "seqs", "columns", "pages", "longer_than", "window"])
def _paged_prefill(
    out_ptr,
    out_scales_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    prob_scale_ptr,
    output_scale_ptr,
    sinks_ptr,
    q_token, q_head,
    k_page, k_head, k_key,
    v_page, v_head, v_key,
    table_seq,
    tokens,
    kv_heads,
    seqs,
    columns,
    pages,
    longer_than,
    window,
    scale,
    softcap,
    SIGN: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
):  # fmt: skip
    # The blocks of a sequence's last tokens have the most keys and go first.
    kv_head = tl.program_id(0) % kv_heads
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // kv_heads
    seq, first_block = _sequence_of(block, query_start_ptr, seqs, GROUP, BLOCK_M)
    first_token = tl.load(query_start_ptr + seq)
    queries = tl.load(query_start_ptr + seq + 1) - first_token
    # Whatever the numbers of a batch are, nothing outside of a tensor is touched: neither a sum that overflows nor a
    # length or start below 0 becomes an address.
    length = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + seq), columns * PAGE), 0)
    present = tl.minimum(queries, tokens - tl.maximum(first_token, 0))
    first_row = (block - first_block) * BLOCK_M
    if (queries <= longer_than) | (first_token < 0) | (first_row < 0) | (first_row >= tl.maximum(present, 0) * GROUP):
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    own = token < present
    position = length - queries + token
    head = kv_head * GROUP + rows % GROUP
    long_token = (first_token + token).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)

    KEY: tl.constexpr = k_ptr.dtype.element_ty
    q = tl.load(q_ptr + (long_token * q_token + head * q_head)[:, None] + dims[None, :], mask=own[:, None], other=0.0)
    factor = scale * scale_or_one(q_scale_ptr) * scale_or_one(k_scale_ptr)
    if KEY.is_fp8():
        if q_scale_ptr is not None and not q.dtype.is_fp8():
            q = quantized(q, tl.load(q_scale_ptr), KEY)
        if q.dtype == tl.bfloat16:
            # To fp16 without a loss: each row divided by a power of two, so that its largest number is near 1.
            largest = tl.max(tl.abs(q.to(tl.float32)), 1)
            power = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 1e-30))))
            q = (q.to(tl.float32) / power[:, None]).to(tl.float16)
            factor = (factor * power)[:, None]
        elif not (q.dtype == KEY and HEAD_DIM >= 32):  # the FP8 unit takes 32 at a time
            q = q.to(tl.float16)
    else:
        q = q.to(KEY)
    if SIGN != 1:
        q = (q.to(tl.float32) * SIGN).to(q.dtype)
    if SOFTCAP:
        factor = factor / softcap
    else:
        factor = factor * LOG2_E
    p_factor = 1.0 / scale_or_one(prob_scale_ptr)

    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    table_ptr += seq.to(tl.int64) * table_seq
    # Keys [first_key, last_key) are seen by some row, [first_full, last_full) by all.
    context = tl.maximum(length - queries, 0)
    first_seen = context + first_row // GROUP
    last_seen = context + tl.minimum((first_row + BLOCK_M - 1) // GROUP, queries - 1)
    last_key = tl.minimum(tl.minimum(last_seen + 1, length), columns * PAGE)
    last_full = tl.minimum(first_seen + 1, last_key) // BLOCK_N * BLOCK_N
    first_key = 0
    first_full = 0
    if WINDOW:
        first_key = tl.maximum(first_seen - window + 1, 0)
        first_full = tl.cdiv(tl.maximum(last_seen - window + 1, 0), BLOCK_N) * BLOCK_N
        first_full = tl.minimum(first_full, tl.cdiv(tl.maximum(last_key, 0), BLOCK_N) * BLOCK_N)
        last_full = tl.maximum(last_full, first_full)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        row_max = tl.maximum(sink, LOWEST)
        row_sum = tl.exp2(sink - row_max)
    else:
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    ROUND_P: tl.constexpr = prob_scale_ptr is not None
    if WINDOW:
        acc, row_sum, row_max = _key_blocks(
            acc, row_sum, row_max, q, position, factor, k_ptr, v_ptr, table_ptr,
            first_key // BLOCK_N * BLOCK_N, first_full, first_key, last_key, columns, pages, k_page, k_key, v_page,
            v_key, window, softcap, p_factor, HEAD_DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, ROUND_P, True,
        )  # fmt: skip
    acc, row_sum, row_max = _key_blocks(
        acc, row_sum, row_max, q, position, factor, k_ptr, v_ptr, table_ptr,
        first_full, last_full, first_key, last_key, columns, pages, k_page, k_key, v_page,
        v_key, window, softcap, p_factor, HEAD_DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, ROUND_P, False,
    )  # fmt: skip
    acc, row_sum, row_max = _key_blocks(
        acc, row_sum, row_max, q, position, factor, k_ptr, v_ptr, table_ptr,
        last_full, last_key, first_key, last_key, columns, pages, k_page, k_key, v_page,
        v_key, window, softcap, p_factor, HEAD_DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, ROUND_P, True,
    )  # fmt: skip

    out_factor = scale_or_one(v_scale_ptr) * scale_or_one(prob_scale_ptr)
    acc = acc * (out_factor / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    row = long_token * (kv_heads * GROUP) + head
    store_rows(out_ptr, out_scales_ptr, output_scale_ptr, acc, row, own, HEAD_DIM, GROUP_SIZE, SMALLEST_SCALE)


def launch_portable(
    out: Tensor,
    out_scales: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    prob_scale: Tensor | None,
    output_scale: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    window: int | None,
    softcap: float,
    smallest_scale: float = SMALLEST_SCALE,
    longer_than: int = 0,
    config: tuple[int, int, int, int] | None = None,
) -> None:
    """Write the attention of all sequences with more than longer_than new tokens into out, and nothing else.

    Arguments as in `fusion_passes.ops.paged_attention`, validated; query and cache bf16, fp16 or FP8 (e4m3fn, e5m2),
    head_dim a power of two from 16 to 256; at least one page in the cache and in the table. The tokens of shorter
    sequences and those of none are left as they are.
    out: contiguous [tokens, heads, head_dim], bf16, fp16 or FP8. out_scales: contiguous fp32 [tokens, heads * head_dim
    / group_size], written if given; the group divides head_dim, output_scale is None then, and out is FP8.
    smallest_scale: of out_scales.
    config: (BLOCK_M, BLOCK_N, num_warps, num_stages), by shape if None. CPU tensors work in Triton's interpreter.
    """
    tokens, heads, head_dim = query.shape
    pages, kv_heads, page_size, _ = key_cache.shape
    seqs, columns = block_table.shape
    if tokens == 0 or seqs == 0:
        return
    group = heads // kv_heads
    block_m, block_n, num_warps, num_stages = config or _config(query, key_cache, seqs)
    blocks = tokens * group // block_m + seqs
    _paged_prefill[(kv_heads * blocks,)](
        out,
        out_scales,
        query,
        key_cache,
        value_cache,
        block_table,
        query_start,
        seq_lens,
        q_scale,
        k_scale,
        v_scale,
        prob_scale,
        output_scale,
        sinks,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        tokens,
        kv_heads,
        seqs,
        columns,
        pages,
        longer_than,
        window or 0,
        # A maximum times the factor is the maximum of the products only for a positive factor; the sign is the query's.
        abs(scale) or 1.0,
        softcap,
        SIGN=(scale > 0) - (scale < 0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOW=window is not None,
        SOFTCAP=softcap > 0.0,
        GROUP_SIZE=0 if out_scales is None else heads * head_dim // out_scales.shape[1],
        SMALLEST_SCALE=smallest_scale,
        num_warps=num_warps,
        num_stages=num_stages,
    )


# (BLOCK_M, BLOCK_N, num_warps, num_stages) by head size and whether the cache is FP8, best first for long sequences.
LONG = {
    (64, True): [(128, 128, 8, 3)],
    (64, False): [(128, 64, 8, 3)],
    (128, True): [(128, 128, 8, 3)],
    (128, False): [(128, 64, 8, 3)],
    (256, True): [(128, 64, 8, 3)],
    (256, False): [(128, 64, 8, 2)],
}
SHORT = {True: [(64, 64, 4, 3)], False: [(64, 32, 4, 3)]}  # for short ones, of any head size up to 128
SMALLEST = [(64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1)]
LONGEST_SHORT = 2048  # tokens of a sequence, on average: their lengths are not known here


def _config(query: Tensor, key_cache: Tensor, seqs: int) -> tuple[int, int, int, int]:
    tokens, _, head_dim = query.shape
    fp8 = key_cache.dtype in FP8_DTYPES
    configs = LONG.get((head_dim, fp8), [])
    if head_dim <= 128 and tokens <= LONGEST_SHORT * seqs:
        configs = SHORT[fp8]
    room = _shared_memory(query.device)
    for config in (*configs, *SMALLEST):
        block_m, block_n, _, num_stages = config
        # The query, K and V for each stage, and both converted to 16 bits.
        tiles = block_m * query.itemsize + 2 * block_n * (num_stages * key_cache.itemsize + 2 * fp8)
        if tiles * head_dim <= room:
            return config
    return SMALLEST[-1]


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block can have."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


QUANTIZED = tl.constexpr(32)  # rows of a program of `_quantize`


@triton.jit(do_not_specialize=["rows"])
def _quantize(out_ptr, x_ptr, scale_ptr, x_token, x_head, rows, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * QUANTIZED + tl.arange(0, QUANTIZED)
    dims = tl.arange(0, HEAD_DIM)
    own = (row < rows)[:, None]
    x = tl.load(x_ptr + (row // HEADS * x_token + row % HEADS * x_head)[:, None] + dims[None, :], mask=own, other=0.0)
    y = quantized(x, tl.load(scale_ptr), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + dims[None, :], y, mask=own)


def launch(
    out: Tensor,
    out_scales: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    prob_scale: Tensor | None,
    output_scale: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    window: int | None,
    softcap: float,
    smallest_scale: float = SMALLEST_SCALE,
    longer_than: int = 0,
) -> None:
    """As `launch_portable`, by the kernel for Hopper unless `why_portable` says no.

    That one multiplies FP8 with FP8, so a query to be quantized is quantized before.
    """
    options = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "smallest_scale": smallest_scale,
        "longer_than": longer_than,
    }
    scales = (q_scale, k_scale, v_scale, prob_scale, output_scale)
    rest = (key_cache, value_cache, block_table, query_start, seq_lens, *scales, sinks)
    tokens, heads, head_dim = query.shape
    group_size = None if out_scales is None else heads * head_dim // out_scales.shape[1]
    if why_portable(query, key_cache, value_cache, q_scale, scale=scale, group_size=group_size) is not None:
        launch_portable(out, out_scales, query, *rest, **options)
        return
    from fusion_passes.kernels import paged_prefill_sm90

    if q_scale is not None and query.dtype not in FP8_DTYPES:
        codes = torch.empty(query.shape, dtype=key_cache.dtype, device=query.device)
        rows = tokens * heads
        _quantize[(triton.cdiv(rows, QUANTIZED.value),)](
            codes, query, q_scale, *query.stride()[:2], rows, HEADS=heads, HEAD_DIM=head_dim
        )
        query = codes
    paged_prefill_sm90.launch(out, out_scales, query, *rest, **options)


def why_portable(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_scale: Tensor | None,
    *,
    scale: float,
    group_size: int | None,
) -> str | None:
    """Why `launch` takes the portable kernel for these tensors, or None if it takes the one for Hopper."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) != (9, 0):
        return "the kernel for Hopper needs a GPU of compute capability 9.0"
    if (why := _why_no_gluon()) is not None:
        return why
    from fusion_passes.kernels import paged_prefill_sm90

    quantized = q_scale is not None and query.dtype not in FP8_DTYPES
    return paged_prefill_sm90.why_unsupported(
        query, key_cache, value_cache, quantized=quantized, scale=scale, group_size=group_size
    )


@functools.cache
def _why_no_gluon() -> str | None:
    """Why this Triton does not have the Gluon that the kernel for Hopper is written in, or None if it does."""
    if tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 6):
        return f"the kernel for Hopper needs Triton 3.6 or later, found {triton.__version__}"
    try:
        from fusion_passes.kernels import paged_prefill_sm90  # noqa: F401
    except (ImportError, AttributeError) as error:  # AttributeError: an experimental API that has moved
        return f"the kernel for Hopper cannot be imported with Triton {triton.__version__}: {error}"
    return None
