"""Dynamic FP8 quantization per group, as people write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion_passes import quant


def _flat(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    spec = quant.QuantSpec(dtype, "group", 32, static=False)
    scales = quant.choose_scale(x, spec)
    return quant.quantize(x, scales, dtype), scales


def _grouped(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups / scales).clamp(-limit, limit).to(dtype)
    return codes.flatten(-2), scales.squeeze(-1)


def _reciprocal(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.reshape(-1, x.shape[-1] // 32, 32)
    scales = groups.abs().amax(-1).float() * (1.0 / limit)
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups * (1.0 / scales)[..., None]).clamp(-limit, limit).to(dtype)
    return codes.view(x.shape), scales


def _lower_bound_of_the_magnitude(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.view(x.shape[0], -1, 32)
    scales = groups.abs().float().amax(2).clamp(1e-4) / limit
    return (groups.float() / scales.unsqueeze(2)).to(dtype).view(x.shape), scales


def _lower_bound_in_the_dtype(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.reshape(x.numel() // 32, 32)
    scales = groups.abs().max(dim=-1, keepdim=True)[0].clamp(min=2.0**-13).to(torch.float32) / limit
    codes = (groups / scales).clamp(min=-limit, max=limit).to(dtype)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], x.shape[-1] // 32)


def _column_major(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.view(-1, x.shape[-1] // 32, 32)
    scales = (groups.abs().max(dim=-1, keepdim=True)[0].float() / limit).clamp(min=1.0 / (limit * 512.0))
    codes = (groups / scales).clamp(-limit, limit).to(dtype).view(x.shape)
    return codes, scales.squeeze(-1).transpose(-2, -1).contiguous().transpose(-1, -2)


def _largest_code_over_the_magnitude(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.view(x.shape[0], -1, 32)
    magnitude = torch.maximum(groups.abs().float().amax(dim=2), torch.full((), 1e-4, device=x.device))
    return (groups * (limit / magnitude.unsqueeze(2))).to(dtype).view(x.shape), magnitude / limit


def _float64(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.reshape(x.shape[0], -1, 32)
    inverse = (limit / groups.abs().amax(-1, keepdim=True).to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    codes = (groups * inverse).clamp(-limit, limit).to(dtype)
    return codes.reshape(x.shape), (1.0 / inverse).squeeze(-1)


def _no_lower_bound(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.float().view(x.shape[0], -1, 32)
    scales = groups.abs().amax(-1) / limit
    return (groups / scales[..., None]).clamp(-limit, limit).to(dtype).view(x.shape), scales


SPELLINGS: dict[str, Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]] = {
    "scales repeated over their groups": _flat,
    "in the shape of groups": _grouped,
    "multiply by the reciprocal": _reciprocal,
    "lower bound of the magnitude, no clamp": _lower_bound_of_the_magnitude,
    "lower bound of the magnitude, in its dtype": _lower_bound_in_the_dtype,
    "lower bound of the scale, scales by columns": _column_major,
    "times the largest code over the magnitude": _largest_code_over_the_magnitude,
    "by way of float64": _float64,
    "no lower bound": _no_lower_bound,
}
"""What is read as a `GroupQuantize`: (x [tokens, hidden], FP8 dtype) -> codes, scales of groups of 32."""
