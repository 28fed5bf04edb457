"""What the operations of this library compute, in plain torch and fp32. Tests, models and CPU kernels share it."""

import torch
from torch import Tensor

from fusion_passes.quant import FP8_DTYPES, quantize, saturate


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``softmax(query @ key.T * scale + mask) @ value`` in fp32, with the conventions of scaled_dot_product_attention.

    query: [batch, heads, q_len, head_dim]; key, value: [batch, kv_heads, kv_len, head_dim], where heads is a multiple
    of kv_heads. attn_mask broadcasts to [batch, heads, q_len, kv_len]: bool (True = attend) or added to the scores.
    is_causal: query i sees keys 0 to i, aligned at the top left also when the lengths differ.
    scale: of the scores, ``head_dim ** -0.5`` if None.

    Where torch's backends differ this is the math backend. A row that may attend to nothing, or has only scores of
    -inf, is 0 (cuDNN gives other numbers for a bool mask). A row whose scores are all the lowest finite number is the
    mean of the values (0 in cuDNN and the memory-efficient backend). A NaN in a row's scores makes the row NaN (0 in
    the flash backend for CPU).
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    with torch.autocast(query.device.type, enabled=False):  # it would round the products
        return _attention(query, key, value, attn_mask, is_causal, scale)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if attn_mask is not None:
        bool_mask = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if bool_mask else scores + attn_mask.float()
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0) @ value


def attention_quant(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    output_scale: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    output_scale_factor: float = 1.0,
    output_scale_inverse: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    """``attention`` followed by static per-tensor quantization: see ``torch.ops.fusion_passes.attention_quant``."""
    out = attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
    out_scale: Tensor | float = output_scale_factor
    if output_scale is not None:
        out_scale = output_scale.reshape(()) * output_scale_factor
    return saturate(out * out_scale if output_scale_inverse else out / out_scale, dtype)


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Each token to its slot: see ``fusion_passes.ops.kv_cache_write``. Asks the device which tokens have one."""
    kept = slot_mapping >= 0
    page, offset = slot_mapping[kept] // key_cache.shape[2], slot_mapping[kept] % key_cache.shape[2]
    for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        bits(cache)[page, :, offset] = bits(as_cached(x, scale, cache.dtype))[kept]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One sequence after the other, in fp32: see ``fusion_passes.ops.paged_attention``. Asks the device for lengths."""
    out_dtype = dtype or query.dtype
    query = as_queried(query, q_scale, key_cache.dtype)
    page_size = key_cache.shape[2]
    out = query.new_zeros(query.shape, dtype=torch.float32)
    starts = query_start.tolist()
    for first, last, length, table in zip(starts, starts[1:], seq_lens.tolist(), block_table, strict=False):
        if first == last or length == 0:
            continue
        at = torch.arange(length - (last - first), length, device=query.device)
        seen = visible(at, torch.arange(length, device=query.device), window)
        # Pages to the left of every window may be gone: their entries are not used.
        pages = table[: -(-length // page_size)].long().clamp(0, key_cache.shape[0] - 1)
        key, value = (
            bits(cache)[pages].view(cache.dtype).transpose(1, 2).flatten(0, 1)[None, :length]
            for cache in (key_cache, value_cache)
        )
        logit_scale = product(scale, q_scale, k_scale)
        out[first:last] = cached_attention(
            query[None, first:last],
            key,
            value,
            seen[None],
            sinks,
            logit_scale=logit_scale,
            softcap=softcap,
            prob_scale=prob_scale,
        )[0]
    return rounded(scaled(out, v_scale), output_scale, out_dtype)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    sinks: Tensor | None = None,
    *,
    logit_scale: Tensor | float,
    softcap: float = 0.0,
    prob_scale: Tensor | None = None,
) -> Tensor:
    """Attention of a batch of sequences over keys that are partly visible, in fp32.

    query: [batch, queries, heads, head_dim]; key, value: [batch, keys, kv_heads, head_dim], FP8 as bare codes.
    visible: bool [batch, queries, keys]. The rest as in ``paged_attention``. A query that sees nothing is 0.
    """
    with torch.autocast(query.device.type, enabled=False):  # it would round the products
        kv_heads = key.shape[2]
        grouped = query.float().unflatten(2, (kv_heads, -1))  # [batch, queries, kv_heads, group, head_dim]
        logits = torch.einsum("bqhgd,bkhd->bhgqk", grouped, key.float()) * logit_scale
        if softcap > 0.0:
            logits = (logits / softcap).tanh() * softcap
        logits = logits.masked_fill(~visible[:, None, None], float("-inf"))
        top = logits.amax(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.float().view(kv_heads, -1, 1, 1)
            top = torch.maximum(top, sink)
        top = top.masked_fill(top == float("-inf"), 0.0)
        probs = (logits - top).exp()
        total = probs.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sink - top).exp()
        if prob_scale is not None:
            probs = saturate(probs / prob_scale.reshape(()), value.dtype).float() * prob_scale.reshape(())
        # 0 * NaN is NaN, and slots that nobody sees may hold anything.
        value = value.float().masked_fill(~visible.any(1)[..., None, None], 0.0)
        out = torch.einsum("bhgqk,bkhd->bhgqd", probs, value) / total
        out = out.masked_fill(total == 0.0, 0.0)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def visible(at: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which keys the queries at positions [..., queries] see: bool [..., queries, keys]."""
    seen = keys <= at[..., None]
    return seen if window is None else seen & (keys > at[..., None] - window)


def as_cached(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x as a cache of this dtype holds it."""
    if x.dtype == dtype:
        return x
    return quantize(x, 1.0 if scale is None else scale.reshape(()), dtype)


def as_queried(query: Tensor, q_scale: Tensor | None, cache_dtype: torch.dtype) -> Tensor:
    """The query that goes into the product: quantized like the cache if it has a scale and is not yet FP8."""
    if q_scale is None or query.dtype in FP8_DTYPES:
        return query
    return quantize(query, q_scale.reshape(()), cache_dtype)


def bits(x: Tensor) -> Tensor:
    """FP8 codes as bytes, which every indexing op takes; anything else as it is."""
    return x.view(torch.uint8) if x.dtype in FP8_DTYPES else x


def product(first: float, *scales: Tensor | None) -> Tensor | float:
    """The product of scales, of which None is 1."""
    result: Tensor | float = first
    for scale in scales:
        result = result if scale is None else scale.reshape(()) * result
    return result


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """x times a scale, of which None is 1."""
    return x if scale is None else x * scale.reshape(())


def rounded(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """fp32 x as an output of this dtype: divided by the scale and saturated if that is FP8."""
    return quantize(x, 1.0 if scale is None else scale.reshape(()), dtype) if dtype in FP8_DTYPES else x.to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, rotary_dim: int, interleaved: bool = False) -> Tensor:
    """Rotary embedding of x in fp32: its first ``rotary_dim`` dimensions turned, the rest as it is.

    x: [..., head_dim]. cos, sin: [..., rotary_dim], one number for each dimension, or [..., rotary_dim / 2], one for
    each pair; they broadcast over heads. A pair is i and i + rotary_dim / 2, or 2 i and 2 i + 1 if interleaved.
    """
    half = rotary_dim // 2
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:].float()
    if interleaved:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
        other = torch.stack((-second, first), -1).flatten(-2)
    else:
        first, second = turned.split(half, -1)
        other = torch.cat((-second, first), -1)
    cos, sin = (_of_each_dimension(c, rotary_dim, interleaved) for c in (cos.float(), sin.float()))
    return torch.cat((turned * cos + other * sin, rest), -1)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_offset: float = 0.0) -> Tensor:
    """``x * (mean(x ** 2) + eps) ** -0.5 * (weight + weight_offset)`` over the last dimension, in fp32.

    x: [..., hidden]. weight: [hidden], or with ones in front; None: 1, whatever the offset.
    """
    x = x.float()
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * (weight.float().reshape(-1) + weight_offset)


def _of_each_dimension(x: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    if x.shape[-1] == rotary_dim:
        return x
    return x.repeat_interleave(2, -1) if interleaved else torch.cat((x, x), -1)
