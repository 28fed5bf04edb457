"""``kv_cache_write``: the keys and values of new tokens go to their slots in a KV cache, quantized if the cache is FP8.

The two caches are changed in place, and declared so: whatever reads them later in a graph stays behind this op.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fusion_passes import reference
from fusion_passes.graph.symbolic import known
from fusion_passes.ops import kv_cache
from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.kernel import Kernel, names
from fusion_passes.ops.support import say_slow
from fusion_passes.quant import FP8_DTYPES, dtype_name

KERNEL_DTYPES = (*kv_cache.HIGH_PRECISION_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
ADVICE = "use a GPU, a Triton and dtypes that the kernel has (python -m fusion_passes doctor tells)"
KERNEL = Kernel(
    name="the RoPE and cache kernel",
    module="fusion_passes.kernels.rope_quant_kv_write",
    takes={
        "for": "RoPE and write, or the write alone",
        "query": names(kv_cache.HIGH_PRECISION_DTYPES),
        "cache": names(KERNEL_DTYPES),
        "head size": "any even",
        "page size": "any",
        "output": "codes, or the query in a dtype of its own",
    },
)


def validate(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Raise ValueError, or TypeError for a dtype, if a write of these cannot mean anything."""
    kv_cache.validate_cache(key_cache, value_cache)
    kv_cache.validate_scales(k_scale=k_scale, v_scale=v_scale)
    kv_cache.validate_devices(
        key_cache.device,
        value_cache=value_cache,
        key=key,
        value=value,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    _, kv_heads, _, head_dim = key_cache.shape
    for name, x in (("key", key), ("value", value)):
        if x.ndim != 3 or known(x.shape[1] != kv_heads) or known(x.shape[2] != head_dim):
            raise ValueError(f"{name} must be [tokens, {kv_heads}, {head_dim}] for this cache, got {list(x.shape)}")
        if x.dtype != key.dtype:
            raise TypeError(f"key and value must have one dtype, got {key.dtype} and {value.dtype}")
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slot_mapping must be int32 or int64, got {slot_mapping.dtype}")
    if slot_mapping.ndim != 1 or any(known(slot_mapping.shape[0] != x.shape[0]) for x in (key, value)):
        raise ValueError(
            f"slot_mapping must have an entry for each token, got {list(slot_mapping.shape)} for keys "
            f"{list(key.shape)} and values {list(value.shape)}"
        )
    if (k_scale is not None or v_scale is not None) and (key_cache.dtype not in FP8_DTYPES or key.dtype in FP8_DTYPES):
        raise ValueError(
            f"k_scale and v_scale quantize {key.dtype} keys for an FP8 cache; this cache is {key_cache.dtype}: "
            "leave them out"
        )
    if key.dtype != key_cache.dtype and (
        key.dtype not in kv_cache.HIGH_PRECISION_DTYPES or key_cache.dtype not in FP8_DTYPES
    ):
        raise TypeError(f"a cache of {key_cache.dtype} does not take keys of {key.dtype}")


@dataclass(frozen=True, eq=False)
class KVCacheWriteArguments(Arguments):
    """Write the key and value of each token into its slot of the caches, in place.

    key, value: [tokens, kv_heads, head_dim], any strides; in the caches' dtype, or high precision for an FP8 cache.
    key_cache, value_cache: [pages, kv_heads, page_size, head_dim], any memory order with head_dim innermost; bf16,
    fp16, fp32 or FP8. An FP8 cache gets ``saturate(key / k_scale)``, or the key's codes as they are if key is FP8.
    slot_mapping: int32 or int64 [tokens], ``page * page_size + offset``; a token with a negative slot is skipped. Two
    tokens in one slot: one of them stays, whichever.
    k_scale, v_scale: fp32, one element, read on the device in each call; None: 1.

    On a GPU the kernel's division is a quick one: where a number lies next to the border between two codes, hardly once
    in 10000, the code may be one step from the CPU's and plain torch's.

    Raises ValueError or TypeError for arguments without a meaning. A slot outside the cache is an IndexError on the
    CPU, and on a GPU with FUSION_PASSES_CHECK=1; otherwise its token is skipped.
    """

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        validate(**self.by_name())

    def check_values(self) -> None:
        """Raise IndexError for a slot outside of the cache. Waits for the device."""
        kv_cache.check_slots(self.slot_mapping, self.key_cache.shape[0], self.key_cache.shape[2])


def _fake(a: KVCacheWriteArguments) -> None:
    """Nothing to return: `a` has been validated."""


def _cpu(a: KVCacheWriteArguments) -> None:
    a.check_values()
    reference.kv_cache_write(**a.by_name())


def _cuda(a: KVCacheWriteArguments) -> None:
    if kv_cache.values_are_checked(a.key_cache.device):
        a.check_values()
    why = run_kernel(
        *(a.key_cache, (a.key.dtype, a.key_cache.dtype)), lambda kernels: kernels.launch_write(**a.by_name())
    )
    if why is not None:
        say_slow("kv_cache_write", "writes in plain torch", why, ADVICE)
        scatter(**a.by_name())


def run_kernel(
    key_cache: Tensor, dtypes: tuple[torch.dtype, ...], launch: Callable[[ModuleType], None], *variant: Hashable
) -> str | None:
    """`launch(module)` of the Triton kernel: None where it ran, or why it does not run here with these dtypes.

    variant: what the kernel is compiled for, beside that and the shape of the cache."""
    why = _why_no_kernel(key_cache.device, *dtypes)
    return why or KERNEL.run(launch, key_cache.device, dtypes, key_cache.shape[1:], *variant)


@functools.cache
def _why_no_kernel(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Asked in each call, and the answer is always the same."""
    return why_no_kernel(device, *dtypes)


def why_no_kernel(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why the Triton kernel does not run on this device, or reads and writes not all of these dtypes; None if it
    does."""
    for dtype in dtypes:
        if dtype not in KERNEL_DTYPES:
            return f"the kernel has no {dtype_name(dtype)}"
    return KERNEL.why_not_on(device)


def scatter(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """``reference.kv_cache_write`` without a question to the device: plain torch that a CUDA graph can capture.

    A skipped token is written where the first token with a slot goes, with that token's numbers: writes to one slot
    are harmless if they agree. If no token has a slot, slot 0 is overwritten with what it holds.
    """
    pages, _, page_size, _ = key_cache.shape
    tokens = slot_mapping.shape[0]
    if tokens == 0 or pages * page_size == 0:
        return
    written = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
    donor = written.int().argmax()
    source = torch.where(written, torch.arange(tokens, device=written.device), donor)
    some = written.any()
    slots = torch.where(some, slot_mapping[source].long(), 0)
    page, offset = slots // page_size, slots % page_size
    for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        codes = reference.bits(reference.as_cached(x, scale, cache.dtype))
        by_slot = reference.bits(cache).transpose(1, 2)  # [pages, page_size, kv_heads, head_dim]
        by_slot.index_put_((page, offset), torch.where(some, codes[source], by_slot[page, offset]))


kv_cache_write = declare(
    "kv_cache_write",
    KVCacheWriteArguments,
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    returns=None,
    writes=("key_cache", "value_cache"),
    kernels=(KERNEL,),
)
