"""`quantize_fp8_dynamic`: FP8 quantisation by scales chosen from the tensor itself, as an opaque op.

Like `quantize_fp8` it is a call that Inductor does not look into.  On a card that has FP8, scales per token or group
and the codes are one kernel, and the codes by one scale for the tensor too; elsewhere it is the plain form.
"""

import math
from types import ModuleType

import torch
from torch import Tensor

from fusion_passes import quant
from fusion_passes.ops.quantize import ADVICE, run_kernel
from fusion_passes.ops.support import on_its_device, say_slow

LARGEST_GROUP = 16384
"""Elements that a program of the kernel holds at once."""

_library = torch.library.Library("fusion_passes", "FRAGMENT")
_library.define(
    "quantize_fp8_dynamic(Tensor x, *, ScalarType dtype, str granularity, SymInt? group_size=None, "
    "float? scale_upper_bound=None, float? scale_lower_bound=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def plain(
    x: Tensor,
    spec: quant.QuantSpec,
    scale_upper_bound: float | None = None,
    scale_lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The codes of x and their scales, in plain torch."""
    scale = quant.choose_scale(x, spec, scale_lower_bound)
    if scale_upper_bound is not None:
        scale = scale.clamp_max(scale_upper_bound)
    return quant.quantize(x, scale, spec.dtype), scale


def _quantize(
    x: Tensor,
    *,
    dtype: torch.dtype,
    granularity: quant.Granularity,
    group_size: int | None = None,
    scale_upper_bound: float | None = None,
    scale_lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    spec = quant.QuantSpec(dtype, granularity, group_size, static=False)
    codes, scale = plain(x, spec, scale_upper_bound, scale_lower_bound)
    return codes.contiguous(), scale.contiguous()


def _quantize_cuda(
    x: Tensor,
    *,
    dtype: torch.dtype,
    granularity: quant.Granularity,
    group_size: int | None = None,
    scale_upper_bound: float | None = None,
    scale_lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    options: dict[str, object] = {"dtype": dtype, "granularity": granularity, "group_size": group_size}
    options |= {"scale_upper_bound": scale_upper_bound, "scale_lower_bound": scale_lower_bound}
    quant.check_lower_bound(scale_lower_bound)
    tensor = granularity == "tensor"
    size = 1 if tensor else x.shape[-1] if group_size is None else group_size
    if size == 0 or (not tensor and x.shape[-1] % size):
        return _quantize(x, **options)  # type: ignore[arg-type]  # it says what is wrong
    codes, scale = _fake(x, **options)  # type: ignore[arg-type]
    if tensor:
        scale = quant.choose_scale(x, quant.QuantSpec(dtype, static=False), scale_lower_bound)
        scale = scale if scale_upper_bound is None else scale.clamp_max(scale_upper_bound)
    largest = math.inf if scale_upper_bound is None else scale_upper_bound
    smallest = quant.SMALLEST_SCALE if scale_lower_bound is None else scale_lower_bound

    def launch(kernels: ModuleType) -> None:
        if tensor:
            kernels.by_scale(x.contiguous(), scale, codes)
        else:
            kernels.by_group(x.contiguous(), size, codes, scale, largest, smallest)

    if size > LARGEST_GROUP:
        why: str | None = f"the kernel has groups of up to {LARGEST_GROUP}, not of {size}"
    else:
        why = run_kernel(x, dtype, launch, size)
    if why is None:
        return codes, scale
    say_slow("quantize_dynamic", "quantises in plain torch", why, ADVICE)
    return _quantize(x, **options)  # type: ignore[arg-type]


def _fake(
    x: Tensor,
    *,
    dtype: torch.dtype,
    granularity: quant.Granularity,
    group_size: int | None = None,
    scale_upper_bound: float | None = None,
    scale_lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    if granularity == "tensor":
        shape = [1]
    else:
        shape = [*x.shape[:-1], 1 if group_size is None else x.shape[-1] // group_size]
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


_library.impl("quantize_fp8_dynamic", _quantize, "CPU")
_library.impl("quantize_fp8_dynamic", on_its_device(_quantize_cuda), "CUDA")
torch.library.register_fake("fusion_passes::quantize_fp8_dynamic", _fake, lib=_library)


def quantize_fp8_dynamic(
    x: Tensor,
    spec: quant.QuantSpec,
    scale_upper_bound: float | None = None,
    scale_lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """FP8 codes of x, contiguous, and the scales that `quant.choose_scale` gives for spec and the lower bound, at most
    the upper one.

    What the upper bound leaves outside of the codes' range saturates.
    """
    codes, scale = torch.ops.fusion_passes.quantize_fp8_dynamic(
        x,
        dtype=spec.dtype,
        granularity=spec.granularity,
        group_size=spec.group_size,
        scale_upper_bound=scale_upper_bound,
        scale_lower_bound=scale_lower_bound,
    )
    return codes, scale
