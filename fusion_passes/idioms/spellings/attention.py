"""Attention, as people write it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _sdpa_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _sdpa_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)


def _sdpa_bool_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0, enable_gqa=True)


def _sdpa_float_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _sdpa_tril_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)


def _repeat_interleave(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _repeat(x: Tensor, heads: int) -> Tensor:
    batch, few, length, head_dim = x.shape
    return x[:, :, None].expand(batch, few, heads // few, length, head_dim).reshape(batch, heads, length, head_dim)


def _repeat_kv(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, _repeat(k, q.shape[1]), _repeat(v, q.shape[1]), is_causal=True)


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ _repeat(k, q.shape[1]).transpose(-1, -2) * 0.3
    return torch.softmax(scores + mask, -1) @ _repeat(v, q.shape[1])


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, _repeat(k, q.shape[1]).transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, _repeat(v, q.shape[1]))


def _masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ _repeat(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(future, -math.inf).float(), -1).to(q.dtype)
    return weights @ _repeat(v, q.shape[1])


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": _sdpa,
    "sdpa, is_causal": _sdpa_causal,
    "sdpa, scale": _sdpa_scale,
    "sdpa, bool mask": _sdpa_bool_mask,
    "sdpa, float mask": _sdpa_float_mask,
    "sdpa, lower triangle as mask": _sdpa_tril_mask,
    "sdpa after repeat_interleave": _repeat_interleave,
    "sdpa after repeat_kv": _repeat_kv,
    "softmax by hand": _softmax,
    "eager attention of transformers": _eager,
    "causal masked_fill by hand": _masked_fill,
}
"""What is read as an `Attention`: (q [batch, heads, q_len, head_dim], k, v, additive mask [q_len, kv_len]) -> out."""
