"""Paged attention for sequences with many new tokens on Hopper, in Gluon (Triton 3.6 and 3.7): warp-specialised.

A program holds two consumer warp groups of 64 query rows each, one warp that loads Q, K and V by TMA into rings in
shared memory, and a warp group between the loads of V and the consumers. That one converts FP8 to fp16, once for both
consumers and while they compute (Hopper's FP8 matrix unit takes no V with head_dim innermost), and puts zeros where no
row sees a key. Q and K meet in FP8. Programs are persistent and take tiles from a counter, because lengths differ and
are not known before; the warp that loads takes them, one ahead, and tells the others.

A row is one query head of one token; as many heads of a key head's group share a tile as the largest power of two that
divides it. Blocks of rows begin at positions that are multiples of their number of tokens, so that only one key block
needs a causal mask, which comes first: key blocks run from the last one down. A sequence's first block may thus reach
back into other tokens; those are not stored.
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusion_passes.kernels.device import multiprocessors
from fusion_passes.kernels.hopper import (
    LOG2_E,
    LOWEST,
    ROWS,
    SLACK,
    barrier,
    descriptor,
    partial_sum,
    scale_rows,
    scores,
)
from fusion_passes.quant import FP8_DTYPES, SMALLEST_SCALE

SEARCHED = gl.constexpr(128)  # sequences looked at in one step of the search for a block's own


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _length(length, most_keys):
    """A length as it is, unless it has no meaning: nothing that is made of it may overflow and become an address."""
    return gl.maximum(gl.minimum(length, most_keys), 0)


@gluon.jit
def _blocks_of(s, batch, TOKENS: gl.constexpr):
    """Numbers of blocks of query rows of the sequences s; past the last sequence 0."""
    query_start_ptr, seq_lens_ptr, seqs, longer_than, most_keys, tokens = (
        batch[0],
        batch[1],
        batch[4],
        batch[8],
        batch[12],
        batch[13],
    )
    real = s < seqs
    queries = gl.load(query_start_ptr + s + 1, mask=real, other=0) - gl.load(query_start_ptr + s, mask=real, other=0)
    length = _length(gl.load(seq_lens_ptr + s, mask=real, other=0), most_keys)
    context = gl.maximum(length - queries, 0)
    blocks = (context % TOKENS + gl.minimum(queries, tokens) + TOKENS - 1) // TOKENS
    return gl.where(queries > longer_than, blocks, 0)


@gluon.jit
def _count(batch, TOKENS: gl.constexpr):
    """The number of blocks of query rows of the batch, for one key head."""
    layout: gl.constexpr = gl.BlockedLayout([SEARCHED // 32], [32], [1], [0])
    total = 0
    for i in range(0, batch[4], SEARCHED):
        total += gl.sum(_blocks_of(i + gl.arange(0, SEARCHED, layout), batch, TOKENS), 0)
    return total


@gluon.jit
def _find(block, batch, TOKENS: gl.constexpr):
    """The sequence that a block belongs to, and the number of blocks before that sequence."""
    layout: gl.constexpr = gl.BlockedLayout([SEARCHED // 32], [32], [1], [0])
    total = 0
    seq = 0
    before = 0
    for i in range(0, batch[4], SEARCHED):
        blocks = _blocks_of(i + gl.arange(0, SEARCHED, layout), batch, TOKENS)
        upto = gl.associative_scan(blocks, 0, _add) + total
        seq += gl.sum((upto <= block).to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(upto <= block, upto, 0), 0))
        total += gl.sum(blocks, 0)
    return seq, before


@gluon.jit
def _first_key(position, length, queries, window):
    """The first key that a row of the sequence sees in the block of rows at a position."""
    return gl.maximum(gl.maximum(position, length - queries) - window + 1, 0)


# What the warp that loads says of a tile to the other partitions, through shared memory. No key blocks: no more tiles.
KEY_BLOCKS = gl.constexpr(0)
LAST_BLOCK = gl.constexpr(1)
POSITION = gl.constexpr(2)  # of the first row
TOKEN = gl.constexpr(3)  # of the first row
FIRST_TOKEN = gl.constexpr(4)  # of the sequence
END_TOKEN = gl.constexpr(5)
LENGTH = gl.constexpr(6)
UNIT = gl.constexpr(7)  # of query heads that share a tile
KV_HEAD = gl.constexpr(8)
SEQUENCE = gl.constexpr(9)
FIELDS = gl.constexpr(10)


@gluon.jit
def _tell(tiles, tile, FIELD: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tiles[0].index(tile % 2 * FIELDS + FIELD).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _told(tiles, tile, FIELD: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(tiles[0].index(tile % 2 * FIELDS + FIELD).load(layout), 0)


@gluon.jit
def _next_tile(tiles, tile, WARPS: gl.constexpr):
    """Waits for the tile-th tile of this program. Returns its number of key blocks."""
    mbarrier.wait(tiles[1].index(tile % 2), (tile // 2) & 1)
    return _told(tiles, tile, KEY_BLOCKS, WARPS)


@gluon.jit
def _done_with_tile(tiles, tile):
    mbarrier.arrive(tiles[2].index(tile % 2), count=1)


# In one tile all partitions take the same number of turns at each ring; `i % STAGES` is the slot and
# `(i // STAGES) & 1` the phase. An arrive counts once for a whole warp group, so "empty" of what both consumers read
# counts to 2.


@gluon.jit
def _load_keys(
    desc, row_of_table, first_key, head, columns, pages, barrier, boxes, slot,
    D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """BLOCK_N keys or values to a slot of a ring: a copy for each page, or part of one, and 128 bytes of head_dim."""
    BITS: gl.constexpr = boxes.dtype.primitive_bitwidth
    COLS: gl.constexpr = min(D, 1024 // BITS)
    BOXES: gl.constexpr = BLOCK_N // BOX
    ids = ()
    for b in gl.static_range(BOXES):
        page = gl.load(row_of_table + gl.minimum((first_key + b * BOX) // PAGE, columns - 1))
        ids = ids + (gl.minimum(gl.maximum(page, 0), pages - 1),)
    mbarrier.expect(barrier, BLOCK_N * D * BITS // 8)
    for b in gl.static_range(BOXES):
        for panel in gl.static_range(D // COLS):
            at = (slot * (D // COLS) + panel) * BOXES + b
            coord = [ids[b], head, (first_key + b * BOX) % PAGE, panel * COLS]
            tma.async_copy_global_to_shared(desc, coord, barrier, boxes.index(at))


@gluon.jit
def _load(
    memory, tiles, batch,
    D: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, K_STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr, VALUES: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The warp that takes tiles and loads Q and K, and V if there are VALUES to convert.

    The first tile has the number of the program, the others come from a counter. Blocks of the last tokens go first.
    """
    q_desc, k_desc, v_desc, q_s, k_boxes, v_boxes, q_full, q_empty, k_full, k_empty, raw_full, raw_empty = memory
    query_start_ptr, seq_lens_ptr, table_ptr, table_seq, columns, pages, units = (
        batch[0],
        batch[1],
        batch[2],
        batch[3],
        batch[5],
        batch[6],
        batch[7],
    )
    window, counter_ptr, packs, most_keys = batch[9], batch[10], batch[11], batch[12]
    TOKENS: gl.constexpr = 2 * ROWS // PACK
    total = _count(batch, TOKENS) * units
    it = 0
    tile = 0
    t = gl.program_id(0)
    while t < total:
        block = (total - 1 - t) // units
        unit = (total - 1 - t) % units
        head = unit // packs
        seq, before = _find(block, batch, TOKENS)
        first_token = gl.load(query_start_ptr + seq)
        end_token = gl.load(query_start_ptr + seq + 1)
        length = _length(gl.load(seq_lens_ptr + seq), most_keys)
        queries = end_token - first_token
        context = gl.maximum(length - queries, 0)
        position = (context // TOKENS + block - before) * TOKENS
        token = first_token + position - context
        # An empty sequence with queries has a block of keys, all of them zeros.
        last = gl.minimum(position // BLOCK_N, (most_keys - 1) // BLOCK_N)
        key_blocks = last + 1
        if WINDOW:
            key_blocks -= gl.minimum(_first_key(position, length, queries, window) // BLOCK_N, last)
        mbarrier.wait(tiles[2].index(tile % 2), ((tile // 2) & 1) ^ 1)
        _tell(tiles, tile, KEY_BLOCKS, key_blocks)
        _tell(tiles, tile, LAST_BLOCK, last)
        _tell(tiles, tile, POSITION, position)
        _tell(tiles, tile, TOKEN, token)
        _tell(tiles, tile, FIRST_TOKEN, first_token)
        _tell(tiles, tile, END_TOKEN, end_token)
        _tell(tiles, tile, LENGTH, length)
        _tell(tiles, tile, UNIT, unit)
        _tell(tiles, tile, KV_HEAD, head)
        _tell(tiles, tile, SEQUENCE, seq)
        mbarrier.arrive(tiles[1].index(tile % 2), count=1)

        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), (tile & 1) ^ 1)
            mbarrier.expect(q_full.index(w), ROWS * D * q_s.dtype.primitive_bitwidth // 8)
            tma.async_copy_global_to_shared(
                q_desc, [token + w * (ROWS // PACK), unit * PACK, 0], q_full.index(w), q_s.index(w)
            )
        row_of_table = table_ptr + seq.to(gl.int64) * table_seq
        for i in range(key_blocks):
            first_key = (last - i) * BLOCK_N
            k_slot = it % K_STAGES
            mbarrier.wait(k_empty.index(k_slot), ((it // K_STAGES) & 1) ^ 1)
            _load_keys(k_desc, row_of_table, first_key, head, columns, pages, k_full.index(k_slot), k_boxes, k_slot,
                       D, PAGE, BOX, BLOCK_N)  # fmt: skip
            if VALUES:
                v_slot = it % RAW_STAGES
                mbarrier.wait(raw_empty.index(v_slot), ((it // RAW_STAGES) & 1) ^ 1)
                _load_keys(v_desc, row_of_table, first_key, head, columns, pages, raw_full.index(v_slot), v_boxes,
                           v_slot, D, PAGE, BOX, BLOCK_N)  # fmt: skip
            it += 1
            if i == gl.minimum(1, key_blocks - 1):  # behind the first loads, to hide how long it takes
                t = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        tile += 1
    mbarrier.wait(tiles[2].index(tile % 2), ((tile // 2) & 1) ^ 1)
    _tell(tiles, tile, KEY_BLOCKS, 0)
    mbarrier.arrive(tiles[1].index(tile % 2), count=1)


@gluon.jit
def _begin(tiles, tile, window, WARPS: gl.constexpr):
    """The first key that a row of the tile sees through its window."""
    length = _told(tiles, tile, LENGTH, WARPS)
    queries = _told(tiles, tile, END_TOKEN, WARPS) - _told(tiles, tile, FIRST_TOKEN, WARPS)
    return _first_key(_told(tiles, tile, POSITION, WARPS), length, queries, window)


@gluon.jit
def _convert_v(
    memory, tiles, window,
    D: gl.constexpr, RAW_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CHUNK: gl.constexpr, BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """The warp group that converts FP8 V to fp16."""
    raw_s, v_s, raw_full, raw_empty, v_full, v_empty = memory
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    it = 0
    tile = 0
    key_blocks = _next_tile(tiles, tile, 4)
    while key_blocks > 0:
        last = _told(tiles, tile, LAST_BLOCK, 4)
        length = _told(tiles, tile, LENGTH, 4)
        first = 0
        if WINDOW:
            first = _begin(tiles, tile, window, 4)
        _done_with_tile(tiles, tile)
        for i in range(key_blocks):
            raw_slot = it % RAW_STAGES
            slot = it % V_STAGES
            mbarrier.wait(raw_full.index(raw_slot), (it // RAW_STAGES) & 1)
            mbarrier.wait(v_empty.index(slot), ((it // V_STAGES) & 1) ^ 1)
            end = length - (last - i) * BLOCK_N
            begin = first - (last - i) * BLOCK_N
            raw = raw_s.index(raw_slot)
            v = v_s.index(slot)
            if (end >= BLOCK_N) & (begin <= 0):
                for c in gl.static_range(BLOCK_N // CHUNK):
                    x = raw.slice(c * CHUNK, CHUNK).load(layout).to(v_s.dtype)
                    v.slice(c * CHUNK, CHUNK).store(x)
            else:  # zeros where no row sees a key: there may be NaN, and 0 * NaN would be NaN
                for c in gl.static_range(BLOCK_N // CHUNK):
                    x = raw.slice(c * CHUNK, CHUNK).load(layout).to(v_s.dtype)
                    key = c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
                    v.slice(c * CHUNK, CHUNK).store(gl.where(((key >= begin) & (key < end))[:, None], x, 0.0))
            fence_async_shared()
            mbarrier.arrive(v_full.index(slot), count=1)
            mbarrier.arrive(raw_empty.index(raw_slot), count=1)
            it += 1
        tile += 1
        key_blocks = _next_tile(tiles, tile, 4)


@gluon.jit
def _load_v(
    memory, tiles, batch,
    D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, V_STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """The warp that loads V which needs no conversion."""
    v_desc, v_boxes, v_s, raw_full, v_full, v_empty = memory
    table_ptr, table_seq, columns, pages = batch[2], batch[3], batch[5], batch[6]
    CHUNK: gl.constexpr = 8  # keys: few registers, and what a swizzled layout can be cut into
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    it = 0
    edges = 0
    tile = 0
    key_blocks = _next_tile(tiles, tile, 1)
    while key_blocks > 0:
        last = _told(tiles, tile, LAST_BLOCK, 1)
        length = _told(tiles, tile, LENGTH, 1)
        head = _told(tiles, tile, KV_HEAD, 1)
        row_of_table = table_ptr + _told(tiles, tile, SEQUENCE, 1).to(gl.int64) * table_seq
        first = 0
        if WINDOW:
            first = _begin(tiles, tile, batch[9], 1)
        _done_with_tile(tiles, tile)
        for i in range(key_blocks):
            first_key = (last - i) * BLOCK_N
            slot = it % V_STAGES
            mbarrier.wait(v_empty.index(slot), ((it // V_STAGES) & 1) ^ 1)
            end = length - first_key
            begin = first - first_key
            if (end >= BLOCK_N) & (begin <= 0):
                _load_keys(v_desc, row_of_table, first_key, head, columns, pages, v_full.index(slot), v_boxes, slot,
                           D, PAGE, BOX, BLOCK_N)  # fmt: skip
            else:  # zeros where no row sees a key: there may be NaN, and 0 * NaN would be NaN
                _load_keys(v_desc, row_of_table, first_key, head, columns, pages, raw_full.index(0), v_boxes, slot,
                           D, PAGE, BOX, BLOCK_N)  # fmt: skip
                mbarrier.wait(raw_full.index(0), edges & 1)
                edges += 1
                v = v_s.index(slot)
                for c in gl.static_range(BLOCK_N // CHUNK):
                    x = v.slice(c * CHUNK, CHUNK).load(layout)
                    key = c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
                    v.slice(c * CHUNK, CHUNK).store(gl.where(((key >= begin) & (key < end))[:, None], x, 0.0))
                fence_async_shared()
                mbarrier.arrive(v_full.index(slot), count=1)
            it += 1
        tile += 1
        key_blocks = _next_tile(tiles, tile, 1)


@gluon.jit
def _logits(s, factors, SOFTCAP: gl.constexpr):
    """Logits from scores, times log2(e) if they are capped, which leaves a factor of 1 for what follows."""
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        s = (1.0 - 2.0 / (gl.exp2(s * factors[1]) + 1.0)) * factors[2]
    return s


@gluon.jit
def _rounded(p32, p_factor, P8: gl.constexpr):
    """The probabilities as they go into the product with V. P8: the FP8 dtype that they are rounded to, or None."""
    if P8 is not None:
        p32 = (p32 * p_factor).to(P8)
    return p32


@gluon.jit
def _step(
    q, rings, state, more, factors, edge, at, first_key,
    W: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, TURNS: gl.constexpr,
    LAZY: gl.constexpr, KW: gl.constexpr, P8: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores of block it + 1, whose K is there, and P.V of block it, both in flight while the softmax runs.

    With a WINDOW, rows at `at` see keys behind edge, which matters for the block that begins at first_key.
    """
    k_s, v_s, k_full, k_empty, v_full, v_empty, turn = rings
    acc, p, row_max, row_sum, it, phase = state
    scale = factors[0]
    v_slot = it % V_STAGES
    v_phase = (it // V_STAGES) & 1
    it += 1
    k_slot = it % K_STAGES
    if TURNS:  # one consumer issues while the other is in its softmax
        mbarrier.wait(turn.index(W), phase)
        phase ^= 1
    s = scores(q, k_s.index(k_slot), BLOCK_N, KW)
    mbarrier.wait(v_full.index(v_slot), v_phase)
    o = warpgroup_mma(p, v_s.index(v_slot), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - W), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    s = _logits(s, factors, SOFTCAP)
    if WINDOW:
        cols = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        if first_key <= edge:
            s = gl.where(cols[None, :] > at[:, None], s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    if LAZY:
        raised = new_max - row_max > (SLACK if P8 is None else 0)  # what is rounded to FP8 must be at most 1
        new_max = gl.where(raised, new_max, row_max)
        any_raised = gl.max(raised.to(gl.int32), 0) != 0
    alpha = gl.exp2(row_max - new_max)
    p32 = gl.exp2(s * scale - new_max[:, None])
    row_sum = scale_rows(row_sum, alpha) + partial_sum(p32)
    p_next = gl.convert_layout(_rounded(p32, factors[3], P8).to(p.dtype), p.type.layout)
    # ptxas sinks the softmax below the wait for P.V, and the overlap is gone, unless a real branch stands between: this
    # wait for the next K block, predicated. As operands of the second wait the results keep LLVM from doing the same.
    mbarrier.wait(k_full.index((it + 1) % K_STAGES), ((it + 1) // K_STAGES) & 1, pred=more)
    acc, p_next, new_max, row_sum, alpha = warpgroup_mma_wait(0, deps=[o, p_next, new_max, row_sum, alpha])
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    if LAZY:
        if any_raised:
            acc = scale_rows(acc, alpha)
    else:
        acc = scale_rows(acc, alpha)
    return (acc, p_next, new_max, row_sum, it, phase)


@gluon.jit
def _consume(
    memory, tiles, rings, epilogue, factors, W: gl.constexpr,
    D: gl.constexpr, PACK: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, TURNS: gl.constexpr, LAZY: gl.constexpr, P8: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Consumer warp group W: rows W * 64 to W * 64 + 63 of each tile."""
    q_s, q_full, q_empty = memory
    k_s, v_s, k_full, k_empty, v_full, v_empty, _turn = rings
    out_ptr, out_scales_ptr, output_scale_ptr, sinks_ptr, out_factor, tokens, heads, window, SMALLEST_SCALE = epilogue
    KW: gl.constexpr = 256 // k_s.dtype.primitive_bitwidth
    TOKENS: gl.constexpr = ROWS // PACK
    score_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, KW]
    )
    out_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_l, k_width=2)
    q_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=score_l, k_width=KW // 8)
    store_l: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    it = 0
    phase = 0
    tile = 0
    key_blocks = _next_tile(tiles, tile, 4)
    while key_blocks > 0:
        position = _told(tiles, tile, POSITION, 4)
        last = _told(tiles, tile, LAST_BLOCK, 4)
        q = q_s.index(W).reshape([ROWS, D])
        mbarrier.wait(q_full.index(W), tile & 1)
        if Q_IN_REGISTERS:  # the bandwidth of the shared memory is for K and V; Q of the next tile can load early
            q = q.load(q_l)
        mbarrier.wait(k_full.index(it % K_STAGES), (it // K_STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[scores(q, k_s.index(it % K_STAGES), BLOCK_N, KW)])
        mbarrier.arrive(k_empty.index(it % K_STAGES), count=1)
        if Q_IN_REGISTERS:
            # Not before: neither the load nor a barrier behind it waits until the registers are there, only their
            # first use does.
            mbarrier.arrive(q_empty.index(W), count=1)
        s = _logits(s, factors, SOFTCAP)
        cols = last * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_l))
        at = position + W * TOKENS + gl.arange(0, ROWS, gl.SliceLayout(1, score_l)) // PACK
        seen = at[:, None] >= cols[None, :]
        if WINDOW:
            seen = seen & (cols[None, :] > at[:, None] - window)
        s = gl.where(seen, s, float("-inf"))
        row_max = gl.maximum(gl.max(s, 1) * factors[0], LOWEST)
        p32 = gl.exp2(s * factors[0] - row_max[:, None])
        row_sum = partial_sum(p32)
        p = gl.convert_layout(_rounded(p32, factors[3], P8).to(v_s.dtype), p_l)
        acc = gl.zeros([ROWS, D], gl.float32, out_l)
        mbarrier.wait(k_full.index((it + 1) % K_STAGES), ((it + 1) // K_STAGES) & 1, pred=key_blocks > 1)
        state = (acc, p, row_max, row_sum, it, phase)
        edge = position + 2 * TOKENS - 1 - window
        for i in range(1, key_blocks):
            state = _step(
                q, rings, state, i < key_blocks - 1, factors, edge, at - window, (last - i) * BLOCK_N, W, BLOCK_N,
                K_STAGES, V_STAGES, TURNS, LAZY, KW, P8, WINDOW, SOFTCAP,
            )  # fmt: skip
        acc, p, row_max, row_sum, it, phase = state
        slot = it % V_STAGES
        mbarrier.wait(v_full.index(slot), (it // V_STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v_s.index(slot), acc, is_async=True)])
        mbarrier.arrive(v_empty.index(slot), count=1)
        it += 1
        if not Q_IN_REGISTERS:
            mbarrier.arrive(q_empty.index(W), count=1)

        first_head = _told(tiles, tile, UNIT, 4) * PACK
        token = _told(tiles, tile, TOKEN, 4)
        first_token = _told(tiles, tile, FIRST_TOKEN, 4)
        end_token = _told(tiles, tile, END_TOKEN, 4)
        length = _told(tiles, tile, LENGTH, 4)
        _done_with_tile(tiles, tile)
        total = gl.sum(row_sum, 1)
        if sinks_ptr is not None:
            row = gl.arange(0, ROWS, gl.SliceLayout(1, score_l))
            sink = gl.load(sinks_ptr + first_head + row % PACK).to(gl.float32) * LOG2_E
            total += gl.convert_layout(gl.exp2(sink - row_max), total.type.layout)
        # A sequence of length 0 with queries has zeros for V, and NaN for P if its page holds some.
        factor = gl.convert_layout(out_factor / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, out_l))
        acc = gl.where(length > 0, acc * factor[:, None], 0.0)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, store_l))
        own_token = token + W * TOKENS + row // PACK
        own = (own_token >= gl.maximum(first_token, 0)) & (own_token < gl.minimum(end_token, tokens))
        out_row = own_token.to(gl.int64) * heads + first_head + row % PACK
        if out_scales_ptr is not None:
            LIMIT: gl.constexpr = 448.0 if out_ptr.dtype.element_ty == gl.float8e4nv else 57344.0
            group_scale = gl.maximum(gl.max(gl.abs(acc), 1) / LIMIT, SMALLEST_SCALE)
            any_nan = gl.max((acc != acc).to(gl.int32), 1) != 0  # which the maximum leaves out
            group_scale = gl.where(any_nan, float("nan"), group_scale)
            acc = acc / group_scale[:, None]
            stored_scale = gl.convert_layout(group_scale, gl.SliceLayout(1, store_l))
            gl.store(out_scales_ptr + out_row, stored_scale, mask=own)
        elif output_scale_ptr is not None:
            acc = acc / gl.load(output_scale_ptr)
        y = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), store_l)  # saturates, and keeps NaN
        dims = gl.arange(0, D, gl.SliceLayout(0, store_l))
        gl.store(out_ptr + out_row[:, None] * D + dims[None, :], y, mask=own[:, None])
        tile += 1
        key_blocks = _next_tile(tiles, tile, 4)


@gluon.jit
def _scale_or_one(scale_ptr):
    scale = 1.0
    if scale_ptr is not None:
        scale = gl.load(scale_ptr)
    return scale


@gluon.jit(
    do_not_specialize=["table_seq", "tokens", "seqs", "columns", "pages", "units", "packs", "longer_than", "window"]
)
def _paged_prefill(
    q_desc, k_desc, v_desc, out_ptr, out_scales_ptr, table_ptr, query_start_ptr, seq_lens_ptr, q_scale_ptr, k_scale_ptr,
    v_scale_ptr, prob_scale_ptr, output_scale_ptr, sinks_ptr, counter_ptr, table_seq, tokens, seqs, columns, pages,
    units, packs, longer_than, window, scale, softcap,
    D: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, SMALLEST_SCALE: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr, V_STAGES: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, TURNS: gl.constexpr,
    LAZY: gl.constexpr, CHUNK: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    CACHE: gl.constexpr = k_desc.dtype
    CONVERT: gl.constexpr = CACHE.is_fp8()
    V: gl.constexpr = gl.float16 if CONVERT else CACHE
    P8: gl.constexpr = CACHE if prob_scale_ptr is not None else None
    BITS: gl.constexpr = CACHE.primitive_bitwidth
    PANELS: gl.constexpr = D * BITS // 1024 if D * BITS > 1024 else 1
    BOXES: gl.constexpr = BLOCK_N // BOX * PANELS
    # TMA fills boxes of some keys and at most 128 bytes of each; in memory they are one tile in the layout for wgmma.
    cache_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], CACHE)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], V)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // PACK, PACK, D], q_desc.layout)
    k_boxes = gl.allocate_shared_memory(CACHE, [K_STAGES * BOXES, 1, 1, BOX, D // PANELS], k_desc.layout)
    k_s = k_boxes._reinterpret(CACHE, [K_STAGES, BLOCK_N, D], cache_l)
    v_boxes = gl.allocate_shared_memory(CACHE, [RAW_STAGES * BOXES, 1, 1, BOX, D // PANELS], v_desc.layout)
    raw_s = v_boxes._reinterpret(CACHE, [RAW_STAGES, BLOCK_N, D], cache_l)
    if CONVERT:
        v_s = gl.allocate_shared_memory(V, [V_STAGES, BLOCK_N, D], v_l)
    else:
        v_s = raw_s
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], bar)
    raw_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], bar)
    raw_empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    tile_s = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    tiles = (tile_s, tile_full, tile_empty)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=3)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(RAW_STAGES):
        mbarrier.init(raw_full.index(i), count=1)
        mbarrier.init(raw_empty.index(i), count=1)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    barrier()
    factor = scale * _scale_or_one(q_scale_ptr) * _scale_or_one(k_scale_ptr)
    # Of scores for what is an argument of exp2; for the soft cap: of its argument, of its result; of probabilities.
    factors = (
        1.0 if SOFTCAP else factor * LOG2_E,
        factor * (2.0 * LOG2_E) / softcap,
        softcap * LOG2_E,
        1.0 / _scale_or_one(prob_scale_ptr),
    )
    out_factor = _scale_or_one(v_scale_ptr) * _scale_or_one(prob_scale_ptr)
    w0: gl.constexpr = 0
    w1: gl.constexpr = 1
    batch = (query_start_ptr, seq_lens_ptr, table_ptr, table_seq, seqs, columns, pages, units, longer_than, window,
             counter_ptr, packs, columns * PAGE, tokens)  # fmt: skip
    epilogue = (out_ptr, out_scales_ptr, output_scale_ptr, sinks_ptr, out_factor, tokens, units * PACK, window,
                SMALLEST_SCALE)  # fmt: skip
    memory = (q_s, q_full, q_empty)
    rings = (k_s, v_s, k_full, k_empty, v_full, v_empty, turn)
    loads = (q_desc, k_desc, v_desc, q_s, k_boxes, v_boxes, q_full, q_empty, k_full, k_empty, raw_full, raw_empty)
    # After the partitions: the warps and the registers of each but the first, which gets the registers that are left.
    if CONVERT:
        values = (raw_s, v_s, raw_full, raw_empty, v_full, v_empty)
        gl.warp_specialize([
            (_consume, (memory, tiles, rings, epilogue, factors, w0, D, PACK, BLOCK_N, K_STAGES, V_STAGES,
                        Q_IN_REGISTERS, TURNS, LAZY, P8, WINDOW, SOFTCAP)),
            (_consume, (memory, tiles, rings, epilogue, factors, w1, D, PACK, BLOCK_N, K_STAGES, V_STAGES,
                        Q_IN_REGISTERS, TURNS, LAZY, P8, WINDOW, SOFTCAP)),
            (_convert_v, (values, tiles, window, D, RAW_STAGES, V_STAGES, CHUNK, BLOCK_N, WINDOW)),
            (_load, (loads, tiles, batch, D, PACK, PAGE, BOX, K_STAGES, RAW_STAGES, CONVERT, BLOCK_N, WINDOW)),
        ], [4, 4, 1], REGISTERS)  # fmt: skip
    else:
        values = (v_desc, v_boxes, v_s, raw_full, v_full, v_empty)
        gl.warp_specialize([
            (_consume, (memory, tiles, rings, epilogue, factors, w0, D, PACK, BLOCK_N, K_STAGES, V_STAGES,
                        Q_IN_REGISTERS, TURNS, LAZY, P8, WINDOW, SOFTCAP)),
            (_consume, (memory, tiles, rings, epilogue, factors, w1, D, PACK, BLOCK_N, K_STAGES, V_STAGES,
                        Q_IN_REGISTERS, TURNS, LAZY, P8, WINDOW, SOFTCAP)),
            (_load_v, (values, tiles, batch, D, PAGE, BOX, V_STAGES, BLOCK_N, WINDOW)),
            (_load, (loads, tiles, batch, D, PACK, PAGE, BOX, K_STAGES, RAW_STAGES, CONVERT, BLOCK_N, WINDOW)),
        ], [4, 1, 1], REGISTERS)  # fmt: skip


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
    config: tuple | None = None,
) -> None:
    """As `paged_prefill.launch`, for what `why_unsupported` has nothing against."""
    tokens, heads, head_dim = query.shape
    pages, kv_heads, page_size, _ = key_cache.shape
    seqs, columns = block_table.shape
    if tokens == 0 or seqs == 0:
        return
    group = heads // kv_heads
    pack = _pack(group)
    block_n, *stages_and_more = config or CONFIG[head_dim, key_cache.dtype in FP8_DTYPES]
    box = math.gcd(page_size, block_n)
    most_tiles = heads // pack * (tokens * pack // (2 * ROWS.value) + 2 * seqs)
    columns_of_box = min(head_dim, 128 // key_cache.element_size())
    _paged_prefill[(min(most_tiles, multiprocessors(query.device)),)](
        descriptor(query, (ROWS.value // pack, pack, head_dim)),
        descriptor(key_cache, (1, 1, box, columns_of_box)),
        descriptor(value_cache, (1, 1, box, columns_of_box)),
        out,
        out_scales,
        block_table,
        query_start,
        seq_lens,
        q_scale,
        k_scale,
        v_scale,
        prob_scale,
        output_scale,
        sinks,
        torch.zeros(1, dtype=torch.int32, device=query.device),  # tiles taken
        block_table.stride(0),
        tokens,
        seqs,
        columns,
        pages,
        heads // pack,
        group // pack,
        longer_than,
        window or 0,
        scale,
        softcap or 1.0,
        head_dim,
        pack,
        page_size,
        box,
        window is not None,
        softcap > 0.0,
        smallest_scale,
        block_n,
        *stages_and_more,
        num_warps=4,
    )


def _pack(group: int) -> int:
    """Query heads of one key head that share a tile: a power of two that divides the group."""
    return math.gcd(group, ROWS.value)


def why_unsupported(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    quantized: bool,
    scale: float,
    group_size: int | None,
) -> str | None:
    """Why `launch` does not take these tensors, or None if it does.

    quantized: what it gets is a contiguous copy of query in the dtype of the cache.
    """
    head_dim, group = query.shape[2], query.shape[1] // key_cache.shape[1]
    if query.dtype != key_cache.dtype and not quantized:
        return f"query is {query.dtype}, the cache {key_cache.dtype}: the matrix unit takes one dtype"
    config = CONFIG.get((head_dim, key_cache.dtype in FP8_DTYPES))
    if config is None:
        return f"it has no tiles for a {key_cache.dtype} cache with a head_dim of {head_dim}"
    if 2 * ROWS.value // _pack(group) > config[0]:
        return f"a block of {2 * ROWS.value // _pack(group)} tokens spans more than one block of {config[0]} keys"
    if key_cache.shape[2] % 16:
        return f"pages of {key_cache.shape[2]} tokens are not a multiple of 16"
    if not scale > 0.0:
        return f"a maximum of scores times {scale} is not the maximum of the products"
    if group_size not in (None, head_dim):
        return f"a group of {group_size} is not a head"
    for x in (key_cache, value_cache) if quantized else (query, key_cache, value_cache):
        steps = (stride * x.itemsize for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)
        if any(step % 16 or not 0 < step < 2**40 for step in (*steps, x.data_ptr() % 16 + 16)):
            return "TMA needs addresses and strides that are positive multiples of 16 bytes"
    return None


# By head_dim and whether the cache is FP8: keys of a block; stages of K, of V in the cache's dtype, and of V as it is
# multiplied; Q in registers; turns at the tensor cores; lazy rescaling; keys converted at a time; registers of a thread
# of the second consumer, of the warps that convert (or load V), and of the one that loads.
CONFIG = {
    (64, True): (128, 3, 3, 3, True, False, False, 64, (208, 64, 32)),
    (64, False): (128, 4, 4, 4, True, False, False, 0, (240, 24, 24)),
    (128, True): (128, 3, 2, 2, False, True, True, 32, (208, 64, 32)),
    (128, False): (128, 3, 2, 2, True, False, True, 0, (240, 24, 24)),
    (256, False): (64, 2, 2, 2, False, False, True, 0, (240, 24, 24)),
}
