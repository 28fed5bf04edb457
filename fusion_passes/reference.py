"""What the operations of this library compute, in plain torch and fp32. Tests, models and CPU kernels share it."""

import torch
from torch import Tensor

from fusion_passes.quant import saturate


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
    """``attention`` followed by static per-tensor quantisation: see ``torch.ops.fusion_passes.attention_quant``."""
    out = attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
    out_scale: Tensor | float = output_scale_factor
    if output_scale is not None:
        out_scale = output_scale.reshape(()) * output_scale_factor
    return saturate(out * out_scale if output_scale_inverse else out / out_scale, dtype)
