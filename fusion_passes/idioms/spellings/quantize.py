"""Static per-tensor FP8 quantization, as people write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _divide(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _divide_in_fp32(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply_reciprocal(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale.reciprocal()).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply_one_over(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * (1 / scale)).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply(x: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * inv_scale).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _multiply_from_left(x: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (inv_scale * x.float()).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _scale_as_number(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / 0.37).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _inverse_as_number(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * 2.5).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _scale_with_factor(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / (scale * 2.0)).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _scale_reshaped(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale.reshape(1, 1).expand(x.shape[0], 1)).clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _clamp_max_first(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).clamp_max(_limit(dtype)).clamp_min(-_limit(dtype)).to(dtype)


def _minimum_maximum(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.full((), _limit(dtype), device=x.device)
    return torch.maximum(torch.minimum(x.float() / scale, limit), -limit).to(dtype)


def _hardtanh(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.hardtanh(x.float() / scale, -_limit(dtype), _limit(dtype)).to(dtype)


def _clamp_above_only(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).clamp(max=_limit(dtype)).to(dtype)


def _no_clamp(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x / scale).to(dtype)


def _rounded_before_the_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).clamp(-_limit(dtype), _limit(dtype)).to(torch.bfloat16).to(dtype)


def _views_between(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = (x.float() / scale).reshape(-1, 2, x.shape[-1] // 2).clamp(-_limit(dtype), _limit(dtype))
    return y.transpose(0, 1).to(dtype)


def _to_whole_numbers(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).round().clamp(-_limit(dtype), _limit(dtype)).to(dtype)


def _cast_only(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "divide": _divide,
    "divide in fp32": _divide_in_fp32,
    "multiply by the reciprocal": _multiply_reciprocal,
    "multiply by one over the scale": _multiply_one_over,
    "multiply by an inverse scale": _multiply,
    "multiply from the left": _multiply_from_left,
    "scale as a number": _scale_as_number,
    "inverse scale as a number": _inverse_as_number,
    "scale with a factor": _scale_with_factor,
    "scale reshaped and expanded": _scale_reshaped,
    "clamp_max before clamp_min": _clamp_max_first,
    "minimum and maximum": _minimum_maximum,
    "hardtanh": _hardtanh,
    "clamp above only": _clamp_above_only,
    "no clamp": _no_clamp,
    "rounded to bf16 before the cast": _rounded_before_the_cast,
    "views between the steps": _views_between,
    "to whole numbers": _to_whole_numbers,
    "cast only": _cast_only,
}
"""What is read as a `Quantize`: (x [tokens, hidden], scale of one element, FP8 dtype) -> codes."""
