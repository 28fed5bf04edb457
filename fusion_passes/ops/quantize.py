"""`quantize_fp8`: static per-tensor FP8 quantization as an opaque op.

Inductor does not look into it, so it never fuses it with its neighbours; the passes recognise it.  On a card that has
FP8 it is one kernel, elsewhere the plain form.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fusion_passes import quant
from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.kernel import Kernel, names
from fusion_passes.ops.support import say_slow

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
ADVICE = "quantize with fusion_passes.quant.quantize, which torch.compile fuses with what comes before"
KERNEL = Kernel(
    name="the quantization kernel",
    module="fusion_passes.kernels.quantize",
    takes={"input": names(SOURCES), "output": names(CODES)},
)


@dataclass(frozen=True, eq=False)
class QuantizeArguments(Arguments):
    """FP8 codes of `x / scale`, divided in fp32 and saturated; x of any shape, `scale` one fp32 element on its
    device.

    Raises ValueError, or TypeError for a dtype, if the call cannot mean anything.
    """

    x: Tensor
    scale: Tensor
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        x, scale, dtype = self.x, self.scale, self.dtype
        if dtype not in quant.FP8_DTYPES:
            raise TypeError(f"dtype must be one of {quant.FP8_DTYPES}, got {dtype}")
        if scale.numel() != 1 or scale.dtype is not torch.float32:
            raise ValueError(f"scale must be one float32 element, got {scale.dtype} of shape {list(scale.shape)}")
        if scale.device != x.device:
            raise ValueError(f"scale is on {scale.device}, x on {x.device}: make the scale a buffer of the module")


def _fake(a: QuantizeArguments) -> Tensor:
    return torch.empty_like(a.x, dtype=a.dtype)


def _cpu(a: QuantizeArguments) -> Tensor:
    return quant.quantize(a.x, a.scale.reshape(()), a.dtype)


def _cuda(a: QuantizeArguments) -> Tensor:
    x, out = a.x, _fake(a)

    def launch(kernels: ModuleType) -> None:
        # Where x has gaps, the order of out's dimensions is x's all the same, and need not be that of `x.contiguous()`.
        same_order = x if x.stride() == out.stride() else torch.empty_like(out, dtype=x.dtype).copy_(x)
        kernels.by_scale(same_order, a.scale, out)

    why = why_no_kernel(x, a.dtype) or KERNEL.run(launch, x.device, x.dtype, a.dtype)
    if why is None:
        return out
    say_slow("quantize", "quantizes in plain torch", why, ADVICE)
    return out.copy_(_cpu(a))


def why_no_kernel(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels do not take such tensors on this machine, or None if they do."""
    if x.dtype not in SOURCES or dtype not in CODES:
        return f"the kernel has no {quant.dtype_name(x.dtype)} to {quant.dtype_name(dtype)}"
    return KERNEL.why_not_on(x.device)


quantize_fp8 = declare("quantize_fp8", QuantizeArguments, fake=_fake, cpu=_cpu, cuda=_cuda, kernels=(KERNEL,))
