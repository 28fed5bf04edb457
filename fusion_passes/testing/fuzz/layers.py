"""Layers for the fuzzer's programs: a module is one of a program's inputs."""

from __future__ import annotations

import torch

from fusion_passes.nn import Attention, AttentionMetadata


def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    pages: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    kv_cache_dtype: str = "fp8_e4m3",
) -> Attention:
    """An attention layer with a cache of random values, and scales that differ."""
    layer = Attention(heads, kv_heads, head_dim, kv_cache_dtype=kv_cache_dtype, dtype=dtype, block_size=block_size)
    layer.allocate_cache(pages)
    if kv_cache_dtype.startswith("fp8"):
        layer.set_scales(q_scale=0.031, k_scale=0.017, v_scale=0.0071)
    return layer


def metadata(new: list[int], lengths: list[int], table: list[list[int]], block_size: int) -> AttentionMetadata:
    """Of sequences with `new` tokens each of `lengths` in all, on the pages that `table` says."""
    return AttentionMetadata.from_lengths(new, lengths, torch.tensor(table, dtype=torch.int32), block_size)
