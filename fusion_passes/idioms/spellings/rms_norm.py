"""RMSNorm as transformers' models and torch write it: (x [..., hidden], weight [hidden]) -> normalised x."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    y = x.to(torch.float32)
    variance = y.pow(2).mean(-1, keepdim=True)
    y = y * torch.rsqrt(variance + 1e-6)
    return weight * y.to(x.dtype)


def _llama4(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
    return y * weight


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = y * (1.0 + weight.float())
    return y.type_as(x)


def _gemma3n(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.pow(y.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
    return (y * weight.float()).type_as(x)


def _olmo2(x: Tensor, weight: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight * y).to(x.dtype)


def _t5(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    y = x * torch.rsqrt(variance + 1e-6)
    if weight.dtype in (torch.float16, torch.bfloat16):
        y = y.to(weight.dtype)
    return weight * y


def _cpm(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(variance + 1e-6)).to(x.dtype) * weight


def _image_gpt(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y / torch.sqrt(torch.mean(torch.square(y), dim=-1, keepdim=True) + 1e-6)
    return y * weight


def _deepseek_v4(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def _without_weight(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def _without_eps(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * y.square().mean(-1, keepdim=True).rsqrt() * weight).to(x.dtype)


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float().unflatten(-1, (2, -1))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * y.flatten(-2).to(x.dtype)


def _one_over_the_root(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * (1.0 / torch.sqrt((y * y).mean(-1) + 1e-6)).unsqueeze(-1)
    return (y * (weight + 1)).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _rms_norm_with_the_default_eps(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def _rms_norm_without_weight(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Llama, Qwen, Mistral": _llama,
    "Llama 4": _llama4,
    "Gemma": _gemma,
    "Gemma 3n": _gemma3n,
    "OLMo 2, gpt-oss": _olmo2,
    "T5": _t5,
    "CPM-Ant": _cpm,
    "ImageGPT": _image_gpt,
    "DeepSeek V4": _deepseek_v4,
    "Mamba 2, in groups": _grouped,
    "without a weight": _without_weight,
    "without eps": _without_eps,
    "one over the root": _one_over_the_root,
    "F.rms_norm": _rms_norm,
    "F.rms_norm, default eps": _rms_norm_with_the_default_eps,
    "F.rms_norm, no weight": _rms_norm_without_weight,
}
"""What is read as an `RMSNorm`.  Of groups the weight is read apart from the norm, since it is of another size."""
