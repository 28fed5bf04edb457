"""`quantize_fp8_dynamic`: FP8 quantization by scales chosen from the tensor itself, as an opaque op.

Like `quantize_fp8` it is a call that Inductor does not look into.  On a card that has FP8, scales per token or group
and the codes are one kernel, and the codes by one scale for the tensor too; elsewhere it is the plain form.
"""

import math
from dataclasses import KW_ONLY, dataclass
from types import ModuleType

import torch
from torch import SymInt, Tensor

from fusion_passes import quant
from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.quantize import ADVICE, KERNEL, why_no_kernel
from fusion_passes.ops.support import say_slow

LARGEST_GROUP = 16384
"""Elements that a program of the kernel holds at once."""

CodesAndScales = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class QuantizeDynamicArguments(Arguments):
    """What `quantize_fp8_dynamic` is called with, its spec taken apart."""

    x: Tensor
    _: KW_ONLY
    dtype: torch.dtype
    granularity: quant.Granularity
    group_size: int | SymInt | None = None
    scale_upper_bound: float | None = None
    scale_lower_bound: float | None = None


def plain(
    x: Tensor,
    spec: quant.QuantSpec,
    scale_upper_bound: float | None = None,
    scale_lower_bound: float | None = None,
) -> CodesAndScales:
    """The codes of x and their scales, in plain torch."""
    scale = quant.choose_scale(x, spec, scale_lower_bound)
    if scale_upper_bound is not None:
        scale = scale.clamp_max(scale_upper_bound)
    return quant.quantize(x, scale, spec.dtype), scale


def _fake(a: QuantizeDynamicArguments) -> CodesAndScales:
    x = a.x
    if a.granularity == "tensor":
        shape = [1]
    else:
        shape = [*x.shape[:-1], 1 if a.group_size is None else x.shape[-1] // a.group_size]
    return x.new_empty(x.shape, dtype=a.dtype), x.new_empty(shape, dtype=torch.float32)


def _cpu(a: QuantizeDynamicArguments) -> CodesAndScales:
    size = None if a.group_size is None else int(a.group_size)
    spec = quant.QuantSpec(a.dtype, a.granularity, size, static=False)
    codes, scale = plain(a.x, spec, a.scale_upper_bound, a.scale_lower_bound)
    return codes.contiguous(), scale.contiguous()


def _cuda(a: QuantizeDynamicArguments) -> CodesAndScales:
    x, upper, lower = a.x, a.scale_upper_bound, a.scale_lower_bound
    quant.check_lower_bound(lower)
    tensor = a.granularity == "tensor"
    size = 1 if tensor else x.shape[-1] if a.group_size is None else int(a.group_size)
    if size == 0 or (not tensor and x.shape[-1] % size):
        return _cpu(a)  # it says what is wrong
    codes, scale = _fake(a)
    if tensor:
        scale = quant.choose_scale(x, quant.QuantSpec(a.dtype, static=False), lower)
        scale = scale if upper is None else scale.clamp_max(upper)
    largest = math.inf if upper is None else upper
    smallest = quant.SMALLEST_SCALE if lower is None else lower

    def launch(kernels: ModuleType) -> None:
        if tensor:
            kernels.by_scale(x.contiguous(), scale, codes)
        else:
            kernels.by_group(x.contiguous(), size, codes, scale, largest, smallest)

    if size > LARGEST_GROUP:
        why: str | None = f"the kernel has groups of up to {LARGEST_GROUP}, not of {size}"
    else:
        why = why_no_kernel(x, a.dtype) or KERNEL.run(launch, x.device, x.dtype, a.dtype, size)
    if why is None:
        return codes, scale
    say_slow("quantize_dynamic", "quantizes in plain torch", why, ADVICE)
    return _cpu(a)


_op = declare(
    "quantize_fp8_dynamic",
    QuantizeDynamicArguments,
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    returns=CodesAndScales,
    kernels=(KERNEL,),
)


def quantize_fp8_dynamic(
    x: Tensor,
    spec: quant.QuantSpec,
    scale_upper_bound: float | None = None,
    scale_lower_bound: float | None = None,
) -> CodesAndScales:
    """FP8 codes of x, contiguous, and the scales that `quant.choose_scale` gives for spec and the lower bound, at most
    the upper one.

    What the upper bound leaves outside of the codes' range saturates.
    """
    return _op(
        x,
        dtype=spec.dtype,
        granularity=spec.granularity,
        group_size=spec.group_size,
        scale_upper_bound=scale_upper_bound,
        scale_lower_bound=scale_lower_bound,
    )
