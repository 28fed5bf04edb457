"""`rope_quant_kv_write`: RoPE of query and key, quantization of query, key and value, and the cache's write, as one op.

It computes in fp32 and rounds once, to what it returns and to what it writes.  So does a kernel of Inductor that fuses
the same steps: inside of a kernel it keeps bf16 values in fp32.  Eager torch rounds after each step.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from fusion_passes import reference
from fusion_passes.graph.symbolic import known
from fusion_passes.ops import kv_cache
from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.kv_cache_write import ADVICE, KERNEL, run_kernel, scatter
from fusion_passes.ops.kv_cache_write import validate as validate_write
from fusion_passes.ops.support import say_slow
from fusion_passes.quant import FP8_DTYPES, saturate


@dataclass(frozen=True, eq=False)
class RopeQuantKVWriteArguments(Arguments):
    """Rotate query and key, write key and value into their slots of the caches in place, and return the query.

    query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]; any strides; bf16, fp16 or fp32.
    cos, sin: [rows, rotary_dim] with one number for each dimension, or [rows, rotary_dim / 2] with one for each pair;
    bf16, fp16 or fp32.  Row t belongs to token t, or row ``positions[t]`` if positions (int32 or int64 [tokens]) are
    given; a negative one counts from the end.  A table [max_position, rotary_dim] of cos and sin side by side is
    given as its two halves.
    rotary_dim: how many dimensions of each head are turned, from the first; the rest passes.  interleaved: a pair is
    2 i and 2 i + 1, not i and i + rotary_dim / 2.
    key_cache, value_cache, slot_mapping, k_scale, v_scale: as in ``kv_cache_write``.
    q_scale: fp32, one element; the query is ``saturate(query / (q_scale * q_scale_factor))``, or times that if
    q_scale_inverse.  dtype: of the query that is returned; None: the cache's with a q_scale, else its own.

    Returns [tokens, heads, head_dim], contiguous.  NaN stays NaN; what is too large for FP8 saturates.  On a GPU codes,
    the query's too, may be one step from the CPU's and plain torch's, as in ``kv_cache_write``.

    Raises ValueError or TypeError for arguments without a meaning.  A slot or position outside of its tensor is an
    IndexError on the CPU, and on a GPU with FUSION_PASSES_CHECK=1; otherwise the token is not written, and the position
    is the nearest one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    _: KW_ONLY
    rotary_dim: int
    interleaved: bool = False
    q_scale_factor: float = 1.0
    q_scale_inverse: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        validate_write(
            *(self.key, self.value, self.key_cache, self.value_cache, self.slot_mapping, self.k_scale, self.v_scale)
        )
        query, key, key_cache, q_scale = self.query, self.key, self.key_cache, self.q_scale
        cos, sin, positions, rotary_dim = self.cos, self.sin, self.positions, self.rotary_dim
        kv_cache.validate_scales(q_scale=q_scale)
        kv_cache.validate_devices(key_cache.device, query=query, cos=cos, sin=sin, positions=positions, q_scale=q_scale)
        head_dim = key.shape[2]
        if query.ndim != 3 or known(query.shape[2] != head_dim) or known(query.shape[0] != key.shape[0]):
            raise ValueError(
                f"query must be [{key.shape[0]}, heads, {head_dim}] like the keys, got {list(query.shape)}"
            )
        if query.dtype != key.dtype or query.dtype not in kv_cache.HIGH_PRECISION_DTYPES:
            raise TypeError(
                f"query and key must have one dtype, bfloat16, float16 or float32, got {query.dtype} and {key.dtype}"
            )
        if rotary_dim < 2 or rotary_dim % 2 or known(rotary_dim > head_dim):
            raise ValueError(f"rotary_dim must be even and from 2 to the head size, {head_dim}, got {rotary_dim}")
        for name, x in (("cos", cos), ("sin", sin)):
            if x.ndim != 2 or all(known(x.shape[1] != width) for width in (rotary_dim, rotary_dim // 2)):
                raise ValueError(
                    f"{name} must be [rows, {rotary_dim}] or [rows, {rotary_dim // 2}], got {list(x.shape)}"
                )
            if x.dtype not in kv_cache.HIGH_PRECISION_DTYPES or x.dtype != cos.dtype:
                raise TypeError(
                    f"cos and sin must have one dtype, bfloat16, float16 or float32, got {cos.dtype} and {sin.dtype}"
                )
        if any(known(a != b) for a, b in zip(cos.shape, sin.shape, strict=True)):
            raise ValueError(f"cos and sin must be alike, got {list(cos.shape)} and {list(sin.shape)}")
        if positions is None:
            if known(cos.shape[0] != key.shape[0]):
                raise ValueError(
                    f"without positions cos and sin have a row for each of the {key.shape[0]} tokens, "
                    f"got {cos.shape[0]}"
                )
        else:
            if positions.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"positions must be int32 or int64, got {positions.dtype}")
            if positions.ndim != 1 or known(positions.shape[0] != key.shape[0]):
                raise ValueError(f"positions must be [{key.shape[0]}], one for each token, got {list(positions.shape)}")
        out = self.out_dtype
        if out not in (*kv_cache.HIGH_PRECISION_DTYPES, *FP8_DTYPES):
            raise TypeError(f"the query leaves as FP8, bfloat16, float16 or float32, not as {out}")
        if q_scale is not None and out not in FP8_DTYPES:
            raise ValueError(f"q_scale quantizes the query, but it leaves as {out}: leave the scale out")

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype that the rotated query leaves in: what is asked for, or the cache's FP8 if it has a scale, or its
        own."""
        if self.dtype is not None:
            return self.dtype
        fp8 = self.q_scale is not None and self.key_cache.dtype in FP8_DTYPES
        return self.key_cache.dtype if fp8 else self.query.dtype

    def check_values(self) -> None:
        """Raise IndexError for a slot outside of the cache or a position outside of the table. Waits for the device."""
        kv_cache.check_slots(self.slot_mapping, self.key_cache.shape[0], self.key_cache.shape[2])
        if self.positions is None or not self.positions.numel():
            return
        first, last, rows = int(self.positions.min()), int(self.positions.max()), self.cos.shape[0]
        if first < -rows or last >= rows:
            raise IndexError(f"positions are from {first} to {last}, cos and sin have {rows} rows")

    def in_plain_torch(self, write: Callable[..., None]) -> Tensor:
        """The op by `write`, which does what ``kv_cache_write`` does: rotated keys go to it in fp32 for an FP8 cache,
        in the cache's dtype for another."""
        cos, sin = self.cos, self.sin
        if self.positions is not None:
            rows = cos.shape[0]
            positions = self.positions.clamp(-rows, rows - 1)  # as the kernel: torch would end the process on a GPU
            cos, sin = cos[positions], sin[positions]
        key, query = (
            reference.rope(x, cos[:, None], sin[:, None], rotary_dim=self.rotary_dim, interleaved=self.interleaved)
            for x in (self.key, self.query)
        )
        key = key if self.key_cache.dtype in FP8_DTYPES else key.to(self.key_cache.dtype)
        write(key, self.value, self.key_cache, self.value_cache, self.slot_mapping, self.k_scale, self.v_scale)
        if self.out_dtype not in FP8_DTYPES:
            return query.to(self.out_dtype)
        by = reference.product(self.q_scale_factor, self.q_scale)
        return saturate(query * by if self.q_scale_inverse else query / by, self.out_dtype)


def _fake(a: RopeQuantKVWriteArguments) -> Tensor:
    return a.query.new_empty(a.query.shape, dtype=a.out_dtype)


def _cpu(a: RopeQuantKVWriteArguments) -> Tensor:
    a.check_values()
    return a.in_plain_torch(reference.kv_cache_write)


def _cuda(a: RopeQuantKVWriteArguments) -> Tensor:
    if kv_cache.values_are_checked(a.key_cache.device):
        a.check_values()
    out = _fake(a)
    why = run_kernel(
        *(a.key_cache, (a.key.dtype, a.key_cache.dtype, a.out_dtype)),
        lambda kernels: kernels.launch(out, **a.by_name(without=("dtype",))),
        *(a.rotary_dim, a.interleaved),
    )
    if why is None:
        return out
    say_slow("rope_quant_kv_write", "rotates and writes in plain torch", why, ADVICE)
    return a.in_plain_torch(scatter)


rope_quant_kv_write = declare(
    "rope_quant_kv_write",
    RopeQuantKVWriteArguments,
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    writes=("key_cache", "value_cache"),
    kernels=(KERNEL,),
)
