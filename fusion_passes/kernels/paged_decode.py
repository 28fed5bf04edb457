"""Paged attention for sequences with a few new tokens, in plain Triton: programs share the keys, others combine.

A decode reads each key once, so nothing but memory should limit it. All query rows of a key head share one small tile
of the matrix unit. An FP8 cache is converted to fp16, exactly and with one instruction for two numbers. V is read as
int16, two columns of a head in one element, because `ldmatrix` transposes 16-bit elements only; the low and the high
bytes go into two products, for the even and the odd columns of the output. Partial results are rounded to fp16 (fp32
for a bf16 cache), the probabilities to the dtype of the product; nothing else is.

Program (key head and rows, split, sequence) takes every splits-th tile of its sequence, so that the number of splits
needs no lengths, and its first page none either. Both kernels are launched before the one that they follow has ended
and wait for it on the device (programmatic dependent launch).
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_passes.kernels.device import launches_early, multiprocessors
from fusion_passes.kernels.fp8 import quantized, to_fp8
from fusion_passes.kernels.paged import LOG2_E, LOWEST, page_of, scale_or_one, store_rows
from fusion_passes.quant import FP8_DTYPES, SMALLEST_SCALE

MAX_QUERY_LEN = 16
"""New tokens of a sequence up to which this kernel is the one to use."""


@triton.jit
def _two(x, PTX: tl.constexpr):
    """fp16 from int16 by instructions that take two elements."""
    return tl.inline_asm_elementwise(PTX, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _halves(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """fp16 values of the low and the high FP8 code of int16 elements."""
    # By PTX one or two instructions for two elements; what LLVM makes of the shifts takes nine.
    if PTX and DTYPE.is_fp8e5():  # the upper half of an fp16
        low = _two(x, "prmt.b32 $0, $1, 0, 0x2404;")
        high = _two(x, "prmt.b32 $0, $1, 0, 0x3414;")
    elif PTX:
        low = _two(
            x, "{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x5520; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;}"
        )
        high = _two(
            x, "{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x5531; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;}"
        )
    else:
        low = (x & 0xFF).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
        high = ((x >> 8) & 0xFF).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def _prepare_query(q, factor, q_scale_ptr, KEY: tl.constexpr, VALUE: tl.constexpr):
    """The query rows [BLOCK_M, HEAD_DIM] as the matrix unit takes them, in VALUE, and the positive factor of a logit,
    for all rows or for each."""
    if KEY.is_fp8() and q_scale_ptr is not None and not q.dtype.is_fp8():
        q = quantized(q, tl.load(q_scale_ptr), KEY)
    # A maximum times the factor is the maximum of the products only for a positive factor: the query takes the sign.
    sign = tl.where(factor < 0.0, -1.0, 1.0)
    factor = tl.maximum(tl.abs(factor), 1e-30, propagate_nan=tl.PropagateNan.ALL)  # 0 * -inf would be NaN
    if KEY.is_fp8() and q.dtype.is_bf16():
        # To fp16 without a loss: each row divided by a power of two, so that its largest number is near 1.
        wide = q.to(tl.float32) * sign
        power = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(wide), 1), 1e-30))))
        q = (wide / power[:, None]).to(VALUE)
        factor = factor * power
    else:
        q = (q.to(tl.float32) * sign).to(VALUE)
    return q, factor


@triton.jit
def _attend(
    q, factor, position, k_ptr, v_ptr, table_ptr, page, start, end, step, first_seen, first_edge, last_edge, length,
    columns, pages, k_page, k_key, v_page, v_key, window, softcap, prob_scale,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TOKEN: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ROUND_P: tl.constexpr, PER_ROW: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M rows over tiles start, start + step, .. < end of a sequence: mean of V, log2 of the sum.

    position: [BLOCK_M], the last key that a row sees. page: of tile start. Keys below first_edge or from last_edge on
    are not seen by every row, those below first_seen or from length on by none.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    KEY: tl.constexpr = k_ptr.dtype.element_ty
    PAIRS: tl.constexpr = KEY.is_fp8()
    COLUMNS: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM  # elements of a row of V as it is read
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    WHOLE_PAGES: tl.constexpr = BLOCK_N % PAGE == 0
    cols = tl.arange(0, BLOCK_N)
    k_dims = tl.arange(0, HEAD_DIM)[None, :]
    v_dims = tl.arange(0, COLUMNS)[None, :]
    if ONE_PAGE:
        slot = cols
    else:
        slot = cols % PAGE
    k_off = (slot * k_key)[:, None] + k_dims
    v_off = (slot * v_key)[:, None] + v_dims
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    share = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    even = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    odd = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        factor = factor * (2.0 * LOG2_E) / softcap
    else:
        factor = factor * LOG2_E
    wide_factor = factor[:, None] if PER_ROW else factor
    p_factor = 1.0 / prob_scale
    for i in tl.range(start, end, step):
        key = i * BLOCK_N + cols
        if ONE_PAGE:
            inside = tl.cast(i % (PAGE // BLOCK_N), tl.int64) * BLOCK_N
            k_tile = k_ptr + (page * k_page + inside * k_key) + k_off
            v_tile = v_ptr + (page * v_page + inside * v_key) + v_off
            page = page_of(table_ptr, (i + step) * BLOCK_N, columns, pages, PAGE)  # one tile ahead: no waiting for it
        elif WHOLE_PAGES:
            k_tile = k_ptr + (page * k_page)[:, None] + k_off
            v_tile = v_ptr + (page * v_page)[:, None] + v_off
            page = page_of(table_ptr, (i + step) * BLOCK_N + cols, columns, pages, PAGE)
        else:
            in_page = (key % PAGE).to(tl.int64)
            k_tile = k_ptr + (page * k_page + in_page * k_key)[:, None] + k_dims
            v_tile = v_ptr + (page * v_page + in_page * v_key)[:, None] + v_dims
            page = page_of(table_ptr, (i + step) * BLOCK_N + cols, columns, pages, PAGE)
        k = tl.load(k_tile)
        logits = tl.dot(q, k.to(q.dtype).T)
        if SOFTCAP:
            e = tl.exp2(logits * wide_factor)
            logits = (1.0 - 2.0 / (e + 1.0)) * (softcap * LOG2_E)
        if ONE_TOKEN:
            seen = key < length
            if WINDOW:
                seen = seen & (key >= first_seen)
            logits = tl.where(seen[None, :], logits, float("-inf"))
        elif WINDOW:
            if (i + 1) * BLOCK_N > last_edge or i * BLOCK_N < first_edge:
                after = key[None, :] > position[:, None] - window
                logits = tl.where((key[None, :] <= position[:, None]) & after, logits, float("-inf"))
        elif (i + 1) * BLOCK_N > last_edge:
            logits = tl.where(key[None, :] <= position[:, None], logits, float("-inf"))
        if SOFTCAP:
            new_max = tl.maximum(row_max, tl.max(logits, 1))
            p = tl.exp2(logits - new_max[:, None])
        else:  # one multiply-add
            new_max = tl.maximum(row_max, tl.max(logits, 1) * factor)
            p = tl.exp2(logits * wide_factor - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        row_max = new_max
        share = share * alpha[:, None] + p  # summed over the keys once, after the loop
        if ROUND_P:
            p = to_fp8(p * p_factor, KEY)
        p = p.to(q.dtype)
        # What no row sees may hold NaN, and 0 * NaN is NaN: zeros are read there.
        used = key < length
        if WINDOW:
            used = used & (key >= first_seen)
        v = tl.load(v_tile, mask=used[:, None], other=0)
        even *= alpha[:, None]
        if PAIRS:
            low, high = _halves(v, KEY, PTX)
            even = tl.dot(p, low, even)
            odd = tl.dot(p, high, odd * alpha[:, None])
        else:
            even = tl.dot(p, v, even)
    total = tl.sum(share, 1)
    some = total > 0.0  # false: this row sees no key here; a NaN counts as one
    some = some | (total != total)
    if PAIRS:
        even = tl.interleave(even, odd)
    return even * tl.where(some, prob_scale / total, 0.0)[:, None], tl.where(
        some, row_max + tl.log2(total), float("-inf")
    )


@triton.jit(
    do_not_specialize=["table_seq", "tokens", "seqs", "columns", "pages", "splits", "row_blocks", "most", "window"],
    do_not_specialize_on_alignment=[
        "table_ptr", "start_ptr", "length_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr", "prob_scale_ptr",
        "output_scale_ptr", "sinks_ptr",
    ],
)  # fmt: skip
def _split(
    out_ptr,
    out_scales_ptr,
    part_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    length_ptr,
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
    seqs,
    columns,
    pages,
    splits,
    row_blocks,
    most,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    SINGLE: tl.constexpr,
    PTX: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The share of one split in BLOCK_M rows of a key head. SINGLE: there is one split, and the output is written.

    part: [KV_HEADS, seqs, splits, most * GROUP, HEAD_DIM], each divided by its own sum; lse: the log2 of that sum.
    """
    kv_head = tl.program_id(0) // row_blocks
    first_row = (tl.program_id(0) % row_blocks) * BLOCK_M
    split = tl.program_id(1)
    seq = tl.program_id(2)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # for the kernel before, whose end this one's launch need not wait for
    KEY: tl.constexpr = k_ptr.dtype.element_ty
    VALUE: tl.constexpr = tl.bfloat16 if KEY.is_bf16() else tl.float16
    PER_ROW: tl.constexpr = KEY.is_fp8() and q_ptr.dtype.element_ty.is_bf16() and q_scale_ptr is None
    ONE_PAGE: tl.constexpr = PAGE % BLOCK_N == 0
    table_ptr += seq.to(tl.int64) * table_seq
    start = split
    if not WINDOW:  # this load need not wait for the others
        if ONE_PAGE:
            page = page_of(table_ptr, start * BLOCK_N, columns, pages, PAGE)
        else:
            page = page_of(table_ptr, start * BLOCK_N + tl.arange(0, BLOCK_N), columns, pages, PAGE)
    # Whatever the numbers of a batch are, nothing outside of a tensor is touched: neither a sum that overflows nor a
    # length or start below 0 becomes an address.
    length = tl.maximum(tl.minimum(tl.load(length_ptr + seq), columns * PAGE), 0)
    first_token = tl.load(start_ptr + seq)
    queries = tl.load(start_ptr + seq + 1) - first_token
    padding = tl.maximum(tl.load(start_ptr + seqs) + seq, 0)
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    # Where all sequences have as many new tokens as there may be, the query need not wait for where it starts.
    expected_token = seq * most
    long_token = (expected_token + token).to(tl.int64)
    q_tile = q_ptr + (head * q_head)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_tile + (long_token * q_token)[:, None], mask=(long_token < tokens)[:, None], other=0.0)
    factor = scale * scale_or_one(q_scale_ptr) * scale_or_one(k_scale_ptr)
    if EARLY and not SINGLE:
        tl.extra.cuda.gdc_launch_dependents()  # when all of these have started, those of _combine may come and wait
    if split == 0 and first_row == 0:
        some = tl.arange(0, triton.next_power_of_2(GROUP))
        nothing = tl.zeros([triton.next_power_of_2(GROUP), HEAD_DIM], tl.float32)
        while padding < tokens:
            at = padding.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + some
            store_rows(out_ptr, out_scales_ptr, output_scale_ptr, nothing, at, some < GROUP, HEAD_DIM, GROUP_SIZE,
                       SMALLEST_SCALE)  # fmt: skip
            padding += seqs
    if queries < 1 or queries > most or first_row >= queries * GROUP:
        return
    long_token = (first_token + token).to(tl.int64)
    real = (token < queries) & (long_token >= 0) & (long_token < tokens)
    position = length - queries + token
    if first_token != expected_token:
        q = tl.load(q_tile + (long_token * q_token)[:, None], mask=real[:, None], other=0.0)
    q, factor = _prepare_query(q, factor, q_scale_ptr, KEY, VALUE)
    first_seen = 0
    first_edge = 0
    if WINDOW:
        first_seen = tl.maximum(length - queries - window + 1, 0)
        first_edge = length - window
        start += first_seen // BLOCK_N
        if ONE_PAGE:
            page = page_of(table_ptr, start * BLOCK_N, columns, pages, PAGE)
        else:
            page = page_of(table_ptr, start * BLOCK_N + tl.arange(0, BLOCK_N), columns, pages, PAGE)
    o, lse = _attend(
        q, factor, position,
        k_ptr + kv_head.to(tl.int64) * k_head, v_ptr + kv_head.to(tl.int64) * v_head, table_ptr, page,
        start, tl.cdiv(length, BLOCK_N), splits, first_seen, first_edge, length - queries + 1, length,
        columns, pages, k_page, k_key, v_page, v_key, window, softcap, scale_or_one(prob_scale_ptr),
        HEAD_DIM, PAGE, BLOCK_N, ONE_TOKEN, WINDOW, SOFTCAP, prob_scale_ptr is not None, PER_ROW, PTX,
    )  # fmt: skip
    if SINGLE:
        weight = scale_or_one(v_scale_ptr)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
            o *= tl.where(lse == float("-inf"), 0.0, weight / (1.0 + tl.exp2(sink - lse)))[:, None]
        else:
            o *= weight
        at = long_token * (KV_HEADS * GROUP) + head
        store_rows(out_ptr, out_scales_ptr, output_scale_ptr, o, at, real, HEAD_DIM, GROUP_SIZE, SMALLEST_SCALE)
    else:
        at = ((kv_head * seqs + seq) * splits + split).to(tl.int64) * (most * GROUP) + row
        dims = tl.arange(0, HEAD_DIM)
        tl.store(part_ptr + at[:, None] * HEAD_DIM + dims[None, :], o.to(part_ptr.dtype.element_ty), mask=real[:, None])
        tl.store(lse_ptr + at, lse, mask=real)


@triton.jit(
    do_not_specialize=["tokens", "seqs", "splits", "most"],
    do_not_specialize_on_alignment=["start_ptr", "v_scale_ptr", "output_scale_ptr", "sinks_ptr"],
)
def _combine(
    out_ptr,
    out_scales_ptr,
    part_ptr,
    lse_ptr,
    start_ptr,
    v_scale_ptr,
    output_scale_ptr,
    sinks_ptr,
    tokens,
    seqs,
    splits,
    most,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Weighs the shares of the splits in one row by their sums, and writes BLOCK_D columns of the output."""
    seq = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    row = tl.program_id(1)
    part = tl.program_id(2)
    first_token = tl.load(start_ptr + seq)
    queries = tl.load(start_ptr + seq + 1) - first_token
    weight = scale_or_one(v_scale_ptr)
    head = kv_head * GROUP + row % GROUP
    long_token = (first_token + row // GROUP).to(tl.int64)
    if queries < 1 or queries > most or row >= queries * GROUP or long_token < 0 or long_token >= tokens:
        if EARLY:
            tl.extra.cuda.gdc_wait()  # what comes after this kernel must not overtake the one before it
        return
    s = tl.arange(0, BLOCK_S)
    at = ((kv_head * seqs + seq) * splits + s).to(tl.int64) * (most * GROUP) + row
    dims = part * BLOCK_D + tl.arange(0, BLOCK_D)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lse = tl.load(lse_ptr + at, mask=s < splits, other=float("-inf"))
    x = tl.load(part_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=(s < splits)[:, None], other=0.0)
    top = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp2(lse - top)
    total = tl.sum(w, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - top)
    o = tl.sum(x.to(tl.float32) * w[:, None], 0) * tl.where(total == 0.0, 0.0, weight / total)
    block = (long_token * (KV_HEADS * GROUP) + head) * (HEAD_DIM // BLOCK_D) + part
    own = tl.full([1], 1, tl.int1)
    store_rows(
        out_ptr, out_scales_ptr, output_scale_ptr, o[None, :], block + tl.zeros([1], tl.int64), own,
        BLOCK_D, GROUP_SIZE, SMALLEST_SCALE,
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How the work is shared. The rows of a key head in row_blocks tiles of block_m, keys in tiles of block_n.

    programs: so many on a processor at once, for which the compiler has to leave registers.
    """

    block_m: int
    row_blocks: int
    block_n: int
    splits: int
    programs: int = 2
    num_warps: int = 4
    num_stages: int = 3

    @property
    def most_registers(self) -> int | None:
        """Of a thread, where the programs would not fit otherwise: a processor has 65536, given out by eights."""
        limit = 65536 // (32 * self.num_warps * self.programs) // 8 * 8
        return limit if limit < 255 else None


MANY_SPLITS = 40
"""From this on, combining costs more than one program more on a processor brings."""


@functools.lru_cache(maxsize=1024)
def plan(
    seqs: int,
    kv_heads: int,
    rows: int,
    max_keys: int,
    page_size: int,
    processors: int,
    mixed: bool = False,
    head_dim: int = 128,
    itemsize: int = 1,
) -> Plan:
    """From shapes alone. mixed: most sequences have fewer than these rows, many just one token. itemsize: of the cache.

    One wave of programs: a second, partly filled one costs up to 40 %, and each further split costs time to combine.
    More sequences than that are split into about eight waves, which even out what different lengths make uneven. Each
    program has two tiles or more.
    """
    # 64 rows spill registers with a head of 256; with one of 32 Triton 3.6 computes something else.
    block_m = 16 if rows <= 16 or mixed else 32 if rows <= 32 or head_dim != 128 else 64
    row_blocks = triton.cdiv(rows, block_m)
    groups = seqs * kv_heads * (1 if mixed else row_blocks)
    key_bytes = head_dim * itemsize
    # Keys of a tile, and the programs whose registers and shared memory a processor has, by the bytes of a key.
    block_n, programs = 64, 4 if 64 <= key_bytes <= 128 else 2
    if block_m > 16:
        programs = min(programs, 3 if block_m == 32 else 2)
    elif key_bytes == 64:
        block_n = 128
    elif key_bytes == 128 and (page_size < 64 or 1.8 * processors < groups <= 2 * processors):
        # Fewer look-ups a key for small pages; more bytes in flight where a wave without splits nearly fills the chip.
        block_n, programs = 128, 3
    if key_bytes > 256:
        block_n = 32
    # A fourth program on each processor would leave 397 to 528 groups one split: a tenth less time for equal lengths,
    # two thirds more for very different ones.
    wave = min(programs, 3) * processors
    if groups > wave:
        splits = min(8, triton.cdiv(8 * wave, groups))
    else:
        if programs > 2 and programs * processors > MANY_SPLITS * groups:
            programs -= 1
        splits = programs * processors // groups
    return Plan(block_m, row_blocks, block_n, max(1, min(splits, triton.cdiv(max_keys, 2 * block_n))), programs)


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
    max_query_len: int,
    smallest_scale: float = SMALLEST_SCALE,
    mixed: bool = False,
    config: Plan | None = None,
) -> None:
    """Write the attention of all sequences with at most max_query_len new tokens into out, and 0 for what pads it.

    Arguments as in `fusion_passes.ops.paged_attention`, validated; query and cache bf16, fp16 or FP8 (e4m3fn, e5m2),
    head_dim a power of two from 16 to 256, block_table's rows contiguous; at least one page in the cache and in the
    table. The tokens of longer sequences are left as they are.
    out: contiguous [tokens, heads, head_dim], bf16, fp16 or FP8. out_scales: contiguous fp32 [tokens, heads, head_dim
    / group_size], written if given; the group is a power of two, output_scale is None then, and out is FP8.
    smallest_scale: of out_scales.
    mixed: most sequences have fewer new tokens than max_query_len.
    config: how to share the work, by shape if None. CPU tensors work in Triton's interpreter.
    """
    tokens, heads, head_dim = query.shape
    pages, kv_heads, page_size, _ = key_cache.shape
    seqs, columns = block_table.shape
    group = heads // kv_heads
    rows = max_query_len * group
    if config is None:
        processors = multiprocessors(query.device) if query.is_cuda else 4
        config = plan(
            *(seqs, kv_heads, rows, columns * page_size, page_size, processors),
            mixed=mixed,
            head_dim=head_dim,
            itemsize=key_cache.element_size(),
        )
    fp8_cache = key_cache.dtype in FP8_DTYPES
    values = value_cache.view(torch.int16) if fp8_cache else value_cache
    early = launches_early(query.device)
    part = lse = None
    if config.splits > 1:
        shape = (kv_heads, seqs, config.splits, rows)
        part_dtype = torch.float32 if key_cache.dtype is torch.bfloat16 else torch.float16
        part = torch.empty((*shape, head_dim), dtype=part_dtype, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    group_size = 0 if out_scales is None else query.numel() // out_scales.numel()
    # The stride of a dimension of size 1 may be anything; it must not make another kernel.
    q_strides = [stride if size > 1 else head_dim for stride, size in zip(query.stride(), query.shape, strict=True)]
    common = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "GROUP_SIZE": group_size,
        "SMALLEST_SCALE": smallest_scale,
        "EARLY": early,
    }
    _split[(kv_heads * config.row_blocks, config.splits, seqs)](
        out,
        out_scales,
        part,
        lse,
        query,
        key_cache,
        values,
        block_table,
        query_start,
        seq_lens,
        q_scale,
        k_scale,
        v_scale,
        prob_scale,
        output_scale,
        sinks,
        *q_strides[:2],
        *key_cache.stride()[:3],
        *values.stride()[:3],
        block_table.stride(0),
        tokens,
        seqs,
        columns,
        pages,
        config.splits,
        config.row_blocks,
        max_query_len,
        window or 0,
        scale,
        softcap,
        **common,
        PAGE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        ONE_TOKEN=max_query_len == 1,
        WINDOW=window is not None,
        SOFTCAP=softcap > 0.0,
        SINGLE=config.splits == 1,
        PTX=query.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.most_registers,
        launch_pdl=early,
    )
    if config.splits == 1:
        return
    block_s = triton.next_power_of_2(config.splits)
    # A program of many warps that has come early and waits is in the way of those that it waits for.
    warps = 4 if block_s > 64 else 1 if rows > 16 or config.splits <= MANY_SPLITS else 2
    block_d = min(head_dim, max(16, group_size, (4096 if warps == 2 else 8192) // block_s))
    _combine[(seqs * kv_heads, rows, head_dim // block_d)](
        out,
        out_scales,
        part,
        lse,
        query_start,
        v_scale,
        output_scale,
        sinks,
        tokens,
        seqs,
        config.splits,
        max_query_len,
        **common,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=warps,
        launch_pdl=early,
    )
