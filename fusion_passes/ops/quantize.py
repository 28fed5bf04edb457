"""`quantize_fp8`: static per-tensor FP8 quantisation as an opaque op.

Inductor does not look into it, so it never fuses it with its neighbours; the passes recognise it.  Its implementation
is the plain one on every device: it is for graphs that must not depend on what Inductor makes of a quantisation.
"""

import torch
from torch import Tensor

from fusion_passes import quant

_library = torch.library.Library("fusion_passes", "FRAGMENT")
_library.define("quantize_fp8(Tensor x, Tensor scale, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _check(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    if dtype not in quant.FP8_DTYPES:
        raise TypeError(f"dtype must be one of {quant.FP8_DTYPES}, got {dtype}")
    if scale.numel() != 1 or scale.dtype is not torch.float32:
        raise ValueError(f"scale must be one float32 element, got {scale.dtype} of shape {list(scale.shape)}")
    if scale.device != x.device:
        raise ValueError(f"scale is on {scale.device}, x on {x.device}: make the scale a buffer of the module")


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(x, scale, dtype)
    return quant.quantize(x, scale.reshape(()), dtype)


def _fake(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(x, scale, dtype)
    return torch.empty_like(x, dtype=dtype)


_library.impl("quantize_fp8", _quantize, "CPU")
_library.impl("quantize_fp8", _quantize, "CUDA")
torch.library.register_fake("fusion_passes::quantize_fp8", _fake, lib=_library)


def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """FP8 codes of `x / scale`, divided in fp32 and saturated; x of any shape, `scale` one fp32 element on its
    device."""
    out: Tensor = torch.ops.fusion_passes.quantize_fp8(x, scale, dtype)
    return out
