"""What the ops over a KV cache ask of it: the layout, the arguments, and in checked mode the values of its indices.

A cache is [pages, kv_heads, page_size, head_dim], whatever its memory order; a slot is ``page * page_size + offset``.
Indices live on the device. On the CPU their values are always checked. On a GPU that would make the host wait, so there
they are checked only with FUSION_PASSES_CHECK=1 in the environment, and not while a CUDA graph is captured; unchecked,
what lies outside the cache is neither written nor read.
"""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_passes.graph.symbolic import known
from fusion_passes.quant import FP8_DTYPES

HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHECK_VARIABLE = "FUSION_PASSES_CHECK"


def checks_wanted(environ: Mapping[str, str]) -> bool:
    """Whether FUSION_PASSES_CHECK asks for the values to be checked on a GPU.  Raises ValueError unless it is 0 or
    1."""
    text = environ.get(CHECK_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{CHECK_VARIABLE}={text!r}: must be 1 (check the values of indices on a GPU) or 0 (do not)")
    return text == "1"


def values_are_checked(device: torch.device) -> bool:
    """Whether an op looks at the values of its indices on this device."""
    wanted = checks_wanted(os.environ)
    return device.type == "cpu" or (wanted and not torch.cuda.is_current_stream_capturing())


def validate_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise ValueError, or TypeError for a dtype, if these are not the two halves of one cache."""
    alike = key_cache.ndim == value_cache.ndim == 4
    if not alike or any(known(a != b) for a, b in zip(key_cache.shape, value_cache.shape, strict=True)):
        raise ValueError(
            "key_cache and value_cache must be [pages, kv_heads, page_size, head_dim], both alike, "
            f"got {list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (*HIGH_PRECISION_DTYPES, *FP8_DTYPES):
        raise TypeError(
            "key_cache and value_cache must have one dtype, FP8 or bfloat16, float16, float32, "
            f"got {key_cache.dtype} and {value_cache.dtype}"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if known(cache.stride(-1) != 1) and known(cache.shape[-1] > 1):
            raise ValueError(f"the last dimension of {name} must be contiguous, got strides {list(cache.stride())}")


def validate_devices(device: torch.device, **tensors: Tensor | None) -> None:
    """Raise ValueError for the first tensor that is on another device."""
    for name, x in tensors.items():
        if x is not None and x.device != device:
            stays = name in ("sinks", "cos", "sin") or name.endswith("_scale")
            advice = "move it there once, for instance by making it a buffer of the module"
            raise ValueError(
                f"{name} is on {x.device}, the rest on {device}: {advice if stays else f'make it on {device}'}"
            )


def validate_scales(**scales: Tensor | None) -> None:
    """Raise TypeError or ValueError for a scale that is not one float32 element."""
    for name, scale in scales.items():
        if scale is None:
            continue
        if scale.dtype is not torch.float32:
            raise TypeError(f"{name} must be float32, got {scale.dtype}: convert it with .float()")
        if known(scale.numel() != 1):
            raise ValueError(f"{name} must hold one element (per-tensor quantization), got {list(scale.shape)}")


def check_slots(slot_mapping: Tensor, pages: int, page_size: int) -> None:
    """Raise IndexError if a slot lies outside the cache. Waits for the device."""
    if slot_mapping.numel() and (last := int(slot_mapping.max())) >= pages * page_size:
        raise IndexError(
            f"slot_mapping names slot {last}, the cache has {pages * page_size}: that is on page "
            f"{last // max(page_size, 1)} of a cache with {pages}. If the slots were made from a block "
            "table, it names that page"
        )


def check_batch(
    tokens: int,
    pages: int,
    page_size: int,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    max_query_len: int | None,
) -> None:
    """Raise ValueError or IndexError if the batch contradicts itself or reaches outside the cache. Waits for the
    device."""
    table, starts, lengths = (x.detach().cpu().long() for x in (block_table, query_start, seq_lens))
    queries = starts.diff()
    if int(starts[0]) != 0 or bool((queries < 0).any()) or int(starts[-1]) > tokens:
        raise ValueError(f"query_start must rise from 0 to at most the {tokens} tokens of query, got {starts.tolist()}")
    if bool(((queries > lengths) & (lengths != 0)).any()) or bool((lengths < 0).any()):
        raise ValueError(
            "seq_lens counts the cached and the new tokens, so that no sequence is shorter than its queries, "
            f"got lengths {lengths.tolist()} for {queries.tolist()} queries"
        )
    if max_query_len is not None and bool((queries > max_query_len).any()):
        raise ValueError(f"max_query_len is {max_query_len}, but the sequences have {queries.tolist()} queries")
    capacity = table.shape[1] * page_size
    if bool((lengths > capacity).any()):
        raise ValueError(
            f"block_table is too short: {table.shape[1]} pages of {page_size} tokens hold {capacity}, "
            f"seq_lens asks for {int(lengths.max())}"
        )
    first_key = torch.zeros_like(lengths) if window is None else (lengths - queries - window + 1).clamp_min(0)
    column = torch.arange(table.shape[1], device=table.device)
    used = ((column + 1) * page_size > first_key[:, None]) & (column * page_size < lengths[:, None])
    outside = used & ((table < 0) | (table >= pages))
    if bool(outside.any()):
        seq, slot = outside.nonzero()[0].tolist()
        raise IndexError(
            f"block_table[{seq}, {slot}] is {int(table[seq, slot])}, the cache has {pages} pages, "
            f"and sequence {seq} of length {int(lengths[seq])} uses that entry"
        )
