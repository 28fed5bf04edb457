"""`quantize_fp8`: static per-tensor FP8 quantisation as an opaque op.

Inductor does not look into it, so it never fuses it with its neighbours; the passes recognise it.  On a card that has
FP8 it is one kernel, elsewhere the plain form.
"""

from collections.abc import Callable, Hashable
from types import ModuleType

import torch
from torch import Tensor

from fusion_passes import quant
from fusion_passes.ops.support import (
    device_capability,
    kernel_module,
    launched,
    on_its_device,
    say_slow,
    triton_version,
)

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
ADVICE = "quantise with fusion_passes.quant.quantize, which torch.compile fuses with what comes before"

_library = torch.library.Library("fusion_passes", "FRAGMENT")
_library.define(
    "quantize_fp8(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


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

    def launch(kernels: ModuleType) -> None:
        # Where x has gaps, the order of out's dimensions is x's all the same, and need not be that of `x.contiguous()`.
        kernels.by_scale(x if x.stride() == out.stride() else torch.empty_like(out, dtype=x.dtype).copy_(x), scale, out)

    if (why := run_kernel(x, dtype, launch)) is None:
        return out
    say_slow("quantize", "quantises in plain torch", why, ADVICE)
    return out.copy_(quant.quantize(x, scale.reshape(()), dtype))


def run_kernel(x: Tensor, dtype: torch.dtype, launch: Callable[[ModuleType], None], *variant: Hashable) -> str | None:
    """`launch(module)` of the Triton kernels: None where it ran, or why they do not take x on this machine.

    variant: what a kernel is compiled for, beside dtypes."""
    if (why := why_no_kernel(x, dtype)) is not None:
        return why
    module = kernel_module("fusion_passes.kernels.quantize")
    if isinstance(module, str):
        return module
    return launched(lambda: ("quantize", x.device, x.dtype, dtype, *variant), lambda: launch(module))


def why_no_kernel(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels do not take such tensors on this machine, or None if they do."""
    if x.dtype not in SOURCES or dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return f"the kernel has no {quant.dtype_name(x.dtype)} to {quant.dtype_name(dtype)}"
    capability = device_capability(x.device)
    if capability is None or capability < (8, 9):
        return "the kernel needs an NVIDIA GPU of compute capability 8.9 or later, for FP8"
    return None if triton_version() is not None else "the kernel needs Triton"


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
