"""Attention with FP8 output for Hopper, in Gluon (Triton 3.6 and 3.7): warp-specialised, TMA in and out, wgmma.

A program holds two consumer warp groups of 64 query rows each, one warp that loads Q and K, and one that loads V, with
TMA into rings in shared memory. Programs are persistent: each works on many tiles of 128 rows of one head. A consumer
issues the scores of the next key block before P.V of this one and runs the softmax while both are in flight. Key blocks
run from the last one down, so that the one block that needs a mask (diagonal, or end of the keys) comes first.

Every tensor is [batch, heads, length, head_dim] with any strides that TMA takes; q_len == kv_len. Loads past the end of
a sequence give zeros, stores are clipped.
"""

import triton
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

# By head_dim: key block, stages of the K and V rings, Q in registers, turns at the tensor cores, lazy rescaling. The
# bounds are 227 KB of shared memory and 240 registers a thread.
CONFIG = {
    64: (128, 4, 4, True, False, False),
    128: (128, 3, 2, True, True, True),
    256: (64, 2, 2, False, False, True),
}


@gluon.jit
def _rounds(num_tiles):
    """Number of tiles of this program."""
    n = gl.num_programs(0)
    rounds = num_tiles // n
    offset = gl.where(rounds % 2 == 1, n - 1 - gl.program_id(0), gl.program_id(0))
    return rounds + (offset < num_tiles - rounds * n).to(gl.int32)


@gluon.jit
def _tile(r, length, heads, batch_heads, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Round r of this program -> batch, query head, first row, number of key blocks.

    Causal: longest rows first, and every second round runs backwards through the programs, which balances the lengths.
    """
    n = gl.num_programs(0)
    t = r * n + gl.where(r % 2 == 1, n - 1 - gl.program_id(0), gl.program_id(0))
    block = t // batch_heads
    batch_head = t - block * batch_heads
    key_blocks = (length + BLOCK_N - 1) // BLOCK_N
    if CAUSAL:
        block = (length + 2 * ROWS - 1) // (2 * ROWS) - 1 - block
        # Up to the diagonal, not clipped at the last key: the upper consumer may skip a block, never its only one.
        key_blocks = (block + 1) * (2 * ROWS // BLOCK_N)
    b = batch_head // heads
    return b, batch_head - b * heads, block * 2 * ROWS, key_blocks


# In one tile all four partitions take the same number of turns at each ring; `i % STAGES` is the slot and
# `(i // STAGES) & 1` the phase. An arrive counts once for a whole warp group, so "empty" counts to 2. No
# "empty" may be signalled for a block whose "full" was not waited for: it could complete the phase before.


@gluon.jit
def _load_qk(
    memory, sizes,
    D: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warp that loads Q and K."""
    q_desc, k_desc, q_s, k_s, q_full, q_empty, k_full, k_empty = memory
    length, heads, group, batch_heads, num_tiles = sizes
    it = 0
    for r in range(_rounds(num_tiles)):
        b, h, row, key_blocks = _tile(r, length, heads, batch_heads, BLOCK_N, CAUSAL)
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), (r & 1) ^ 1)
            mbarrier.expect(q_full.index(w), ROWS * D * 2)
            tma.async_copy_global_to_shared(q_desc, [b, h, row + w * ROWS, 0], q_full.index(w), q_s.index(w))
        for i in range(key_blocks):
            s = it % K_STAGES
            mbarrier.wait(k_empty.index(s), ((it // K_STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(s), BLOCK_N * D * 2)
            first_key = (key_blocks - 1 - i) * BLOCK_N
            tma.async_copy_global_to_shared(k_desc, [b, h // group, first_key, 0], k_full.index(s), k_s.index(s))
            it += 1


@gluon.jit
def _load_v(
    memory, sizes,
    D: gl.constexpr, BLOCK_N: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warp that loads V."""
    v_desc, v_s, v_full, v_empty = memory
    length, heads, group, batch_heads, num_tiles = sizes
    it = 0
    for r in range(_rounds(num_tiles)):
        b, h, _row, key_blocks = _tile(r, length, heads, batch_heads, BLOCK_N, CAUSAL)
        for i in range(key_blocks):
            s = it % V_STAGES
            mbarrier.wait(v_empty.index(s), ((it // V_STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(s), BLOCK_N * D * 2)
            first_key = (key_blocks - 1 - i) * BLOCK_N
            tma.async_copy_global_to_shared(v_desc, [b, h // group, first_key, 0], v_full.index(s), v_s.index(s))
            it += 1


@gluon.jit
def _step(
    q, rings, state, more, scale,
    W: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, TURNS: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """Scores of block it + 1, whose K is there, and P.V of block it, both in flight while the softmax runs."""
    k_s, v_s, k_full, k_empty, v_full, v_empty, turn = rings
    acc, p, row_max, row_sum, it, phase = state
    v_slot = it % V_STAGES
    v_phase = (it // V_STAGES) & 1
    it += 1
    k_slot = it % K_STAGES
    if TURNS:  # one consumer issues while the other is in its softmax
        mbarrier.wait(turn.index(W), phase)
        phase ^= 1
    s = scores(q, k_s.index(k_slot).reshape([BLOCK_N, D]), BLOCK_N, 16)
    mbarrier.wait(v_full.index(v_slot), v_phase)
    o = warpgroup_mma(p, v_s.index(v_slot).reshape([BLOCK_N, D]).slice(0, p.shape[1]), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - W), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    if LAZY:
        raised = new_max - row_max > SLACK
        new_max = gl.where(raised, new_max, row_max)
        any_raised = gl.max(raised.to(gl.int32), 0) != 0  # needs a barrier: pays only where O is wide
    alpha = gl.exp2(row_max - new_max)
    p32 = gl.exp2(s * scale - new_max[:, None])
    row_sum = scale_rows(row_sum, alpha) + partial_sum(p32)
    p_next = gl.convert_layout(p32.to(p.dtype), p.type.layout)
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
def _last_pv(rings, state, D: gl.constexpr, BLOCK_N: gl.constexpr, V_STAGES: gl.constexpr):
    _, v_s, _, _, v_full, v_empty, _ = rings
    acc, p, _, row_sum, it, phase = state
    slot = it % V_STAGES
    mbarrier.wait(v_full.index(slot), (it // V_STAGES) & 1)
    v = v_s.index(slot).reshape([BLOCK_N, D]).slice(0, p.shape[1])
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v, acc, is_async=True)])
    mbarrier.arrive(v_empty.index(slot), count=1)
    return acc, row_sum, it + 1, phase


@gluon.jit
def _consume(
    memory, rings, sizes, scale, out_scale_factor, W: gl.constexpr,
    D: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, TURNS: gl.constexpr, LAZY: gl.constexpr, CAUSAL: gl.constexpr,
    SCALED: gl.constexpr, INVERSE: gl.constexpr,
):  # fmt: skip
    """Consumer warp group W: rows W * 64 to W * 64 + 63 of each tile."""
    o_desc, out_scale_ptr, q_s, q_full, q_empty, o_s = memory
    k_s, _, k_full, k_empty, v_full, v_empty, _ = rings
    length, heads, _, batch_heads, num_tiles = sizes
    # Of the first block of a causal tile the upper group needs one half (BLOCK_N 128) or nothing (BLOCK_N 64).
    UPPER: gl.constexpr = CAUSAL and W == 0
    N0: gl.constexpr = 64 if UPPER else BLOCK_N
    SKIP: gl.constexpr = UPPER and BLOCK_N == 64
    gl.static_assert(not (SKIP and TURNS), "a skipped block takes no turn")
    score_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    first_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N0, 16])
    out_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_l, k_width=2)
    q_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=score_l, k_width=2)
    it = 0
    phase = 0
    for r in range(_rounds(num_tiles)):
        b, h, row, key_blocks = _tile(r, length, heads, batch_heads, BLOCK_N, CAUSAL)
        row += W * ROWS
        q = q_s.index(W).reshape([ROWS, D])
        mbarrier.wait(q_full.index(W), r & 1)
        if Q_IN_REGISTERS:  # leaves the bandwidth of the shared memory to K and V, and Q of the next tile loads early
            q = q.load(q_l)

        first = key_blocks - 1
        if SKIP:
            mbarrier.wait(k_full.index(it % K_STAGES), (it // K_STAGES) & 1)
            mbarrier.arrive(k_empty.index(it % K_STAGES), count=1)
            mbarrier.wait(v_full.index(it % V_STAGES), (it // V_STAGES) & 1)
            mbarrier.arrive(v_empty.index(it % V_STAGES), count=1)
            it += 1
            first -= 1

        mbarrier.wait(k_full.index(it % K_STAGES), (it // K_STAGES) & 1)
        k = k_s.index(it % K_STAGES).reshape([BLOCK_N, D]).slice(0, N0)
        s = warpgroup_mma_wait(0, deps=[scores(q, k, N0, 16)])
        mbarrier.arrive(k_empty.index(it % K_STAGES), count=1)
        if Q_IN_REGISTERS:
            # Not before: neither the load nor a barrier behind it waits until the registers are there, only their first
            # use does, and where tiles are short Q of the next one came in earlier.
            mbarrier.arrive(q_empty.index(W), count=1)
        cols = first * BLOCK_N + gl.arange(0, N0, gl.SliceLayout(0, first_l))
        if CAUSAL:
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, first_l))
            s = gl.where(rows[:, None] >= cols[None, :], s, float("-inf"))
        else:
            s = gl.where((cols < length)[None, :], s, float("-inf"))
        first_max = gl.maximum(gl.max(s, 1) * scale, LOWEST)
        p32 = gl.exp2(s * scale - first_max[:, None])
        row_sum = partial_sum(p32)
        row_max = gl.convert_layout(first_max, gl.SliceLayout(1, score_l), assert_trivial=True)
        p0 = gl.convert_layout(p32.to(q_s.dtype), p_l)
        acc = gl.zeros([ROWS, D], gl.float32, out_l)
        mbarrier.wait(k_full.index((it + 1) % K_STAGES), ((it + 1) // K_STAGES) & 1, pred=first > 0)

        state = (acc, p0, row_max, row_sum, it, phase)
        if UPPER and not SKIP:  # the first P is narrower than the others, so it cannot enter the loop
            if first > 0:
                wide = _step(q, rings, state, first > 1, scale, W, D, BLOCK_N, K_STAGES, V_STAGES, TURNS, LAZY)
                for i in range(first - 1):
                    wide = _step(q, rings, wide, i < first - 2, scale, W, D, BLOCK_N, K_STAGES, V_STAGES, TURNS, LAZY)
                acc, row_sum, it, phase = _last_pv(rings, wide, D, BLOCK_N, V_STAGES)
            else:
                acc, row_sum, it, phase = _last_pv(rings, state, D, BLOCK_N, V_STAGES)
        else:
            for i in range(first):
                state = _step(q, rings, state, i < first - 1, scale, W, D, BLOCK_N, K_STAGES, V_STAGES, TURNS, LAZY)
            acc, row_sum, it, phase = _last_pv(rings, state, D, BLOCK_N, V_STAGES)
        if not Q_IN_REGISTERS:
            mbarrier.arrive(q_empty.index(W), count=1)

        out_scale = out_scale_factor
        if SCALED:
            out_scale = gl.load(out_scale_ptr) * out_scale_factor
        factor = out_scale if INVERSE else 1.0 / out_scale
        total = gl.sum(row_sum, 1)
        acc = acc * gl.convert_layout(factor / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, out_l))[:, None]
        tma.store_wait(0)
        o_s.index(W).reshape([ROWS, D]).store(acc.to(o_s.dtype))  # the conversion saturates and keeps NaN
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [b, h, row, 0], o_s.index(W))
    tma.store_wait(0)


# A size of 1, or a multiple of 16, must not make another kernel.
@gluon.jit(do_not_specialize=["length", "heads", "group", "batch_heads", "num_tiles"])
def _attention_quant(
    q_desc, k_desc, v_desc, o_desc, out_scale_ptr, length, heads, group, batch_heads, num_tiles, scale,
    out_scale_factor, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, TURNS: gl.constexpr, LAZY: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    SCALED: gl.constexpr, INVERSE: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(q_desc.dtype, [K_STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(q_desc.dtype, [V_STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    o_s = gl.allocate_shared_memory(o_desc.dtype, [2, 1, 1, ROWS, D], o_desc.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()
    barrier()
    w0: gl.constexpr = 0
    w1: gl.constexpr = 1
    memory = (o_desc, out_scale_ptr, q_s, q_full, q_empty, o_s)
    rings = (k_s, v_s, k_full, k_empty, v_full, v_empty, turn)
    sizes = (length, heads, group, batch_heads, num_tiles)
    qk = (q_desc, k_desc, q_s, k_s, q_full, q_empty, k_full, k_empty)
    v = (v_desc, v_s, v_full, v_empty)
    # After the partitions: the warps and the registers of each but the first, which gets the registers that are left.
    gl.warp_specialize([
        (_consume, (memory, rings, sizes, scale, out_scale_factor, w0, D, BLOCK_N, K_STAGES, V_STAGES, Q_IN_REGISTERS,
                    TURNS, LAZY, CAUSAL, SCALED, INVERSE)),
        (_consume, (memory, rings, sizes, scale, out_scale_factor, w1, D, BLOCK_N, K_STAGES, V_STAGES, Q_IN_REGISTERS,
                    TURNS, LAZY, CAUSAL, SCALED, INVERSE)),
        (_load_qk, (qk, sizes, D, BLOCK_N, K_STAGES, CAUSAL)),
        (_load_v, (v, sizes, D, BLOCK_N, V_STAGES, CAUSAL)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


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
) -> None:
    """Write the FP8 attention output into `out`. Arguments as in `fusion_passes.ops.attention_quant`, supported."""
    if attn_mask is not None or query.shape[2] != key.shape[2] or not scale > 0.0:
        raise ValueError("the Hopper attention kernel takes no mask, equal lengths and a positive scale")
    batch, heads, length, head_dim = query.shape
    config = CONFIG[head_dim]
    block_n = config[0]
    tiles = batch * heads * triton.cdiv(length, 2 * ROWS.value)
    programs = min(tiles, multiprocessors(query.device))
    scale_tensor = query if output_scale is None else output_scale
    arguments = (
        descriptor(query, (1, 1, ROWS.value, head_dim)),
        descriptor(key, (1, 1, block_n, head_dim)),
        descriptor(value, (1, 1, block_n, head_dim)),
        descriptor(out, (1, 1, ROWS.value, head_dim)),
        scale_tensor,
        length,
        heads,
        heads // key.shape[1],
        batch * heads,
        tiles,
        scale * LOG2_E.value,
        output_scale_factor,
        *config,
        head_dim,
        is_causal,
        output_scale is not None,
        output_scale_inverse,
    )
    # All that Triton specialises on. Looking its kernel up here saves a large part of the time of a launch.
    variant = (query.device, query.dtype, out.dtype, scale_tensor.data_ptr() % 16 == 0, *arguments[12:])
    kernel = _compiled.get(variant)
    if kernel is None:
        _compiled[variant] = _attention_quant[(programs,)](*arguments, num_warps=4)
    else:
        kernel[programs, 1, 1](*arguments)


_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}
