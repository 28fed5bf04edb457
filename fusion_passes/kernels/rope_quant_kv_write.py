"""RoPE, quantization and the write into a KV cache in Triton, also the write alone: one kernel for all of it.

A program takes some heads of one token: of the query, or the same ones of key and value. What it loads is turned and
rounded in registers and leaves for the output or the token's slot.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from fusion_passes.kernels.device import launches_early
from fusion_passes.kernels.fp8 import to_fp8
from fusion_passes.quant import FP8_DTYPES


@triton.jit
def _rounded(x, scale, SCALED: tl.constexpr, INVERSE: tl.constexpr, dtype: tl.constexpr):
    """fp32 x as a tensor of this dtype holds it."""
    if SCALED:
        # Not `quantized`: a rounded division took a sixth more time at 8192 tokens. Few codes differ, by a step.
        x = x * scale if INVERSE else x / scale
    if dtype.is_fp8():
        y = to_fp8(x, dtype)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def _as_it_is(
    dst, src, loaded, stored, scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """WIDTH dimensions of each head from FIRST on: quantized, not turned; bits of one dtype stay what they are."""
    d = tl.arange(0, BLOCK)[None, :]
    x = tl.load(src + FIRST + d, mask=loaded & (d < WIDTH))
    if SCALED or src.dtype.element_ty != dst.dtype.element_ty:
        x = _rounded(x.to(tl.float32), scale, SCALED, INVERSE, dst.dtype.element_ty)
    tl.store(dst + FIRST + d, x, mask=stored & (d < WIDTH))


@triton.jit
def _turned(
    dst, src, loaded, stored, scale, cos, sin,
    HALF: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """The first 2 * HALF dimensions of each head, turned and quantized.

    dst, src: pointers [heads, 1] to a head each, with the masks loaded and stored. cos, sin: pointers to the token's
    row. WIDE: it has a number for each dimension. STEP: from one number to the next.
    """
    d = tl.arange(0, BLOCK)[None, :]
    heads: tl.constexpr = src.shape[0]
    inside = d < HALF
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        pairs = tl.load(src + both, mask=loaded & (both < 2 * HALF))
        x1, x2 = tl.split(tl.reshape(pairs, [heads, BLOCK, 2]))
    else:
        x1 = tl.load(src + d, mask=loaded & inside)
        x2 = tl.load(src + HALF + d, mask=loaded & inside)
    if WIDE and INTERLEAVED:
        cos1, cos2 = tl.split(tl.reshape(tl.load(cos + both * STEP, mask=both < 2 * HALF), [1, BLOCK, 2]))
        sin1, sin2 = tl.split(tl.reshape(tl.load(sin + both * STEP, mask=both < 2 * HALF), [1, BLOCK, 2]))
    else:
        cos1 = tl.load(cos + d * STEP, mask=inside)
        sin1 = tl.load(sin + d * STEP, mask=inside)
        cos2 = tl.load(cos + (HALF + d) * STEP, mask=inside) if WIDE else cos1
        sin2 = tl.load(sin + (HALF + d) * STEP, mask=inside) if WIDE else sin1
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    cos1, cos2 = cos1.to(tl.float32), cos2.to(tl.float32)
    sin1, sin2 = sin1.to(tl.float32), sin2.to(tl.float32)
    y1 = _rounded(x1 * cos1 - x2 * sin1, scale, SCALED, INVERSE, dst.dtype.element_ty)
    y2 = _rounded(x2 * cos2 + x1 * sin2, scale, SCALED, INVERSE, dst.dtype.element_ty)
    if INTERLEAVED:
        turned = tl.reshape(tl.join(y1, y2), [heads, 2 * BLOCK])
        tl.store(dst + both, turned, mask=stored & (both < 2 * HALF))
    else:
        tl.store(dst + d, y1, mask=stored & inside)
        tl.store(dst + HALF + d, y2, mask=stored & inside)


@triton.jit(do_not_specialize=["rows", "slots"])
def _rope_quant_kv_write(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_t, q_h,
    k_t, k_h,
    v_t, v_h,
    cos_t,
    sin_t,
    kc_p, kc_h, kc_s,
    vc_p, vc_h, vc_s,
    rows,
    slots,
    q_scale_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    STEP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_SCALED: tl.constexpr,
    Q_INVERSE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()  # for the kernel before, whose end this one's launch need not wait for
    # The heads of a token lie side by side, so programs that do are neighbours too.
    q_chunks: tl.constexpr = (HEADS + BLOCK_Q - 1) // BLOCK_Q
    chunks: tl.constexpr = q_chunks + (KV_HEADS + BLOCK_KV - 1) // BLOCK_KV
    chunk = tl.program_id(0) % chunks
    # 64-bit offsets: a tensor can hold more than 2**31 elements.
    t = (tl.program_id(0) // chunks).to(tl.int64)
    if HALF > 0:
        row = t
        if positions_ptr is not None:
            row = tl.load(positions_ptr + t).to(tl.int64)
            row = tl.where(row < 0, row + rows, row)
            row = tl.minimum(tl.maximum(row, 0), rows - 1)
        cos = cos_ptr + row * cos_t
        sin = sin_ptr + row * sin_t
    if HEADS > 0:  # noqa: SIM102 (known while compiling, so that there is no branch)
        if chunk < q_chunks:
            q_head = (chunk * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None]
            q_inside = q_head < HEADS
            q_scale = q_scale_factor
            if q_scale_ptr is not None:
                q_scale = tl.load(q_scale_ptr) * q_scale_factor
            q_src = q_ptr + t * q_t + q_head.to(tl.int64) * q_h
            q_dst = out_ptr + (t * HEADS + q_head) * HEAD_DIM
            _turned(
                q_dst, q_src, q_inside, q_inside, q_scale, cos, sin,
                HALF, BLOCK_HALF, WIDE, STEP, INTERLEAVED, Q_SCALED, Q_INVERSE,
            )  # fmt: skip
            if 2 * HALF < HEAD_DIM:
                _as_it_is(
                    q_dst, q_src, q_inside, q_inside, q_scale,
                    2 * HALF, HEAD_DIM - 2 * HALF, BLOCK_REST, Q_SCALED, Q_INVERSE,
                )  # fmt: skip
    if chunk >= q_chunks:
        h = ((chunk - q_chunks) * BLOCK_KV + tl.arange(0, BLOCK_KV))[:, None]
        inside = h < KV_HEADS
        slot = tl.load(slot_ptr + t).to(tl.int64)
        stored = inside & (slot >= 0) & (slot < slots)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        h = h.to(tl.int64)
        k_scale = 1.0
        if k_scale_ptr is not None:
            k_scale = tl.load(k_scale_ptr)
        k_src = k_ptr + t * k_t + h * k_h
        k_dst = key_cache_ptr + page * kc_p + h * kc_h + offset * kc_s
        if HALF > 0:
            _turned(
                k_dst, k_src, inside, stored, k_scale, cos, sin,
                HALF, BLOCK_HALF, WIDE, STEP, INTERLEAVED, k_scale_ptr is not None, False,
            )  # fmt: skip
        if 2 * HALF < HEAD_DIM:
            _as_it_is(
                k_dst, k_src, inside, stored, k_scale,
                2 * HALF, HEAD_DIM - 2 * HALF, BLOCK_REST, k_scale_ptr is not None, False,
            )  # fmt: skip
        v_scale = 1.0
        if v_scale_ptr is not None:
            v_scale = tl.load(v_scale_ptr)
        v_src = v_ptr + t * v_t + h * v_h
        v_dst = value_cache_ptr + page * vc_p + h * vc_h + offset * vc_s
        _as_it_is(
            v_dst, v_src, inside, stored, v_scale,
            0, HEAD_DIM, BLOCK_D, v_scale_ptr is not None, False,
        )  # fmt: skip


Config = tuple[int, int, int]
"""BLOCK_Q and BLOCK_KV, heads in a program, and num_warps."""


def launch(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    rotary_dim: int,
    interleaved: bool,
    q_scale_factor: float,
    q_scale_inverse: bool,
    config: Config | None = None,
) -> None:
    """Write the query into `out`, contiguous, and key and value into the caches. Arguments as in
    `fusion_passes.ops.rope_quant_kv_write`, validated. CPU tensors work in Triton's interpreter."""
    _launch(
        *(out, query, key, value, cos, sin, positions, key_cache, value_cache, slot_mapping),
        *(q_scale, k_scale, v_scale, query.shape[1], rotary_dim, interleaved, q_scale_factor, q_scale_inverse, config),
    )


def launch_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    config: Config | None = None,
) -> None:
    """Write key and value into the caches as they are. Arguments as in `fusion_passes.ops.kv_cache_write`."""
    _launch(
        *(key, key, key, value, key, key, None, key_cache, value_cache, slot_mapping),
        *(None, k_scale, v_scale, 0, 0, False, 1.0, False, config),
    )


def _launch(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    heads: int,
    rotary_dim: int,
    interleaved: bool,
    q_scale_factor: float,
    q_scale_inverse: bool,
    config: Config | None,
) -> None:
    tokens, kv_heads, head_dim = key.shape
    page_size = key_cache.shape[2]
    slots = key_cache.shape[0] * page_size
    if tokens == 0:
        return
    query, key, value = _rows(query), _rows(key), _rows(value)
    if cos.stride(-1) != sin.stride(-1):
        cos, sin = cos.contiguous(), sin.contiguous()
    positions = positions if positions is None else positions.contiguous()
    slot_mapping = slot_mapping.contiguous()
    block_q, block_kv, num_warps = config or _config(heads, kv_heads, head_dim)
    half = rotary_dim // 2
    programs = tokens * (-(-heads // block_q) + -(-kv_heads // block_kv))
    tensors = (
        *(out, query, key, value, cos, sin, positions, key_cache, value_cache, slot_mapping),
        *(q_scale, k_scale, v_scale),
    )
    strides = (
        *_strides(query, 2),
        *_strides(key, 2),
        *_strides(value, 2),
        *_strides(cos, 1),
        *_strides(sin, 1),
        *_strides(key_cache, 3),
        *_strides(value_cache, 3),
    )
    rows = cos.shape[0]
    early = launches_early(key.device)
    constants = (
        heads,
        kv_heads,
        head_dim,
        half,
        max(page_size, 1),
        rotary_dim > 0 and cos.shape[1] == rotary_dim,
        cos.stride(-1) if rotary_dim > 0 else 1,
        interleaved,
        out.dtype in FP8_DTYPES and (q_scale is not None or q_scale_factor != 1.0),
        q_scale_inverse,
        block_q,
        block_kv,
        _power(half),
        _power(head_dim - rotary_dim),
        _power(head_dim),
        early,
    )
    arguments = (*tensors, *strides, rows, slots, q_scale_factor, *constants)
    # All that Triton specialises on. Looking its kernel up here saves a large part of the time of a launch.
    kinds = [x if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    variant = (key.device, num_warps, rows < 2**31, slots < 2**31, strides, constants, *kinds)
    kernel = _compiled.get(variant)
    if kernel is None:
        kernel = _rope_quant_kv_write[(programs,)](*arguments, num_warps=num_warps, launch_pdl=early)
        if kernel is not None:  # there is none in the interpreter
            _compiled[variant] = kernel
    else:
        kernel[programs, 1, 1](*arguments)


_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous: a copy only where that is not so."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(x: Tensor, count: int) -> list[int]:
    """The first strides; 0 where there is one element, whose stride says nothing and would cost a compilation."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)][:count]


@functools.cache  # Triton's own takes microseconds, of which a launch has few
def _power(n: int) -> int:
    return triton.next_power_of_2(max(n, 1))


@functools.cache
def _config(heads: int, kv_heads: int, head_dim: int) -> Config:
    """As many heads as give a thread 16 bytes of each half: the best from 256 tokens on, and not worse below."""
    block_d = _power(head_dim)
    return min(max(2048 // block_d, 1), _power(heads)), min(max(1024 // block_d, 1), _power(kv_heads)), 4
