"""The vocabulary of FP8 quantization, in plain torch: what a quantized tensor is, and how one is made.

Everywhere in this library `value = code * scale`: a scale multiplies on the way back and divides on the way in.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The lower bound of chosen scales: the smallest normal number."""

Granularity = Literal["tensor", "token", "group"]


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized.

    granularity: one scale for the whole `tensor`, for each `token` (all but the last dimension), or for each
    `group` of `group_size` neighbours in the last dimension.
    static: the scale is known before the tensor is (calibrated); otherwise it is chosen from the tensor itself.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = "tensor"
    group_size: int | None = None
    static: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in FP8_DTYPES:
            raise ValueError(f"dtype must be one of {FP8_DTYPES}, got {self.dtype}")
        if self.granularity not in ("tensor", "token", "group"):
            raise ValueError(f"granularity must be 'tensor', 'token' or 'group', got {self.granularity!r}")
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with granularity='group', and only with it")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be positive, got {self.group_size}")


def max_value(dtype: torch.dtype) -> float:
    """The largest finite value of an FP8 dtype: 448 for e4m3fn, 57344 for e5m2, 240 and 57344 for the fnuz forms."""
    return float(torch.finfo(dtype).max)


def dtype_name(dtype: torch.dtype) -> str:
    """The name without `torch.`, for a sentence: float8_e4m3fn."""
    return str(dtype).removeprefix("torch.")


def choose_scale(x: Tensor, spec: QuantSpec, lower_bound: float | None = None) -> Tensor:
    """The fp32 scale that maps the largest magnitude to the largest code.

    x: [..., hidden]. Returns [1] for a tensor, [..., 1] for tokens, [..., hidden / group_size] for groups. A NaN
    or an infinity in x spreads to the scale.
    lower_bound: of the scale, which an all-zero tensor gets; ``SMALLEST_SCALE`` if None. With 0 the scale can be 0, and
    codes are NaN where it is. Raises ValueError for one that is negative or not finite.
    """
    lower_bound = SMALLEST_SCALE if lower_bound is None else lower_bound
    check_lower_bound(lower_bound)
    magnitude = x.float().abs()
    if spec.granularity == "tensor":
        amax = magnitude.amax().reshape(1)
    elif spec.granularity == "token":
        amax = magnitude.amax(-1, keepdim=True)
    else:
        if spec.group_size is None or x.shape[-1] % spec.group_size:
            raise ValueError(f"the last dimension, {x.shape[-1]}, is not a multiple of group_size {spec.group_size}")
        amax = magnitude.unflatten(-1, (-1, spec.group_size)).amax(-1)
    return (amax / max_value(spec.dtype)).clamp_min(lower_bound)


def check_lower_bound(lower_bound: float | None) -> None:
    """Raise ValueError for a lower bound of scales that is negative or not finite."""
    if lower_bound is not None and not 0.0 <= lower_bound <= torch.finfo(torch.float32).max:
        raise ValueError(f"a lower bound of scales must be a finite number, 0 or more, got {lower_bound}")


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to FP8, out-of-range values to the largest finite code of their sign, NaN to NaN.

    `Tensor.to` alone does not: up to torch 2.11 it turns e4m3fn overflow into NaN, and e5m2 overflow is inf.
    """
    limit = max_value(dtype)
    return x.clamp(-limit, limit).to(dtype)


def quantize(x: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """FP8 codes of `x / scale`, divided in fp32 and saturated. scale: as `choose_scale` returns it, or a number."""
    return saturate(x.float() / _per_element(scale, x), dtype)


def dequantize(x: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """`x * scale` of FP8 codes x, multiplied in fp32 and rounded to dtype."""
    return (x.float() * _per_element(scale, x)).to(dtype)


def codes(x: Tensor) -> Tensor:
    """FP8 codes as int32 in the order of their values, so that differences count representable steps.

    Both zeros are 0. Infinities and NaN lie far from every number: neither passes for a neighbour of the maximum.
    """
    code = x.view(torch.uint8).int()
    magnitude = code & 0x7F
    order = torch.where(code >= 0x80, -magnitude, magnitude)
    value = x.float()
    order = torch.where(value.isinf(), order.sign() * 2**16, order)
    return torch.where(value.isnan(), 2**20, order)


def _per_element(scale: Tensor | float, x: Tensor) -> Tensor | float:
    """The scale in a shape that broadcasts against x: group scales are repeated over their groups."""
    if not isinstance(scale, Tensor) or scale.ndim == 0 or scale.shape[-1] in (1, x.shape[-1]):
        return scale
    return scale.repeat_interleave(x.shape[-1] // scale.shape[-1], -1)
