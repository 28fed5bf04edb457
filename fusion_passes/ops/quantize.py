"""`quantize_fp8`: static per-tensor FP8 quantisation as an opaque op.

Inductor does not look into it, so it never fuses it with its neighbours; the passes recognise it.  On a card that has
FP8 it is one kernel, elsewhere the plain form.
"""

import torch
from torch import Tensor

from fusion_passes import quant
from fusion_passes.ops.support import device_capability, on_its_device, triton_version

SOURCES = (torch.bfloat16, torch.float16, torch.float32)

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


def _quantize_cuda(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(x, scale, dtype)
    out = torch.empty_like(x, dtype=dtype)
    if not has_kernel(x, dtype):
        return out.copy_(quant.quantize(x, scale.reshape(()), dtype))
    from fusion_passes.kernels.quantize import by_scale

    # Where x has gaps, the order of out's dimensions is x's all the same, and need not be that of `x.contiguous()`.
    by_scale(x if x.stride() == out.stride() else torch.empty_like(out, dtype=x.dtype).copy_(x), scale, out)
    return out


def has_kernel(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels take such tensors on this machine."""
    capability = device_capability(x.device)
    fits = x.dtype in SOURCES and dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return fits and capability is not None and capability >= (8, 9) and triton_version() is not None


def _fake(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(x, scale, dtype)
    return torch.empty_like(x, dtype=dtype)


_library.impl("quantize_fp8", _quantize, "CPU")
_library.impl("quantize_fp8", on_its_device(_quantize_cuda), "CUDA")
torch.library.register_fake("fusion_passes::quantize_fp8", _fake, lib=_library)


def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """FP8 codes of `x / scale`, divided in fp32 and saturated; x of any shape, `scale` one fp32 element on its
    device."""
    out: Tensor = torch.ops.fusion_passes.quantize_fp8(x, scale, dtype)
    return out
