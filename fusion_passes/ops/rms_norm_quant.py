"""`rms_norm_quant` and `rms_norm_group_quant`: RMSNorm and FP8 quantization as one op, by a static scale or by scales
chosen for each group.

Computed in fp32 and rounded once, to FP8: what separate operators round to bf16 in between is not.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass
from types import ModuleType

import torch
from torch import Tensor

from fusion_passes import quant, reference
from fusion_passes.graph.symbolic import known
from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.kernel import Kernel, names
from fusion_passes.ops.quantize import CODES, SOURCES
from fusion_passes.ops.quantize_dynamic import plain
from fusion_passes.ops.support import say_slow

LARGEST_ROW = 32768
"""Elements that a program of the kernel holds at once."""
ADVICE = "normalise and quantize in plain torch, which torch.compile fuses"
KERNEL = Kernel(
    name="the RMSNorm kernel",
    module="fusion_passes.kernels.rms_norm_quant",
    takes={
        "input": f"{names(SOURCES)}, rows of up to {LARGEST_ROW}",
        "output": f"{names(CODES)}; scales for a whole row or for a power of two",
    },
)


@dataclass(frozen=True, eq=False)
class _Norm(Arguments):
    """What both ops begin with."""

    x: Tensor
    weight: Tensor | None = None

    def check(self, dtype: torch.dtype) -> None:
        """Raise TypeError or ValueError if the call cannot mean anything."""
        x, weight = self.x, self.weight
        if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
            raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
        if x.ndim == 0:
            raise ValueError("x must have a dimension to normalise, got a scalar")
        if dtype not in quant.FP8_DTYPES:
            raise TypeError(f"dtype must be one of {quant.FP8_DTYPES}, got {dtype}")
        if weight is None:
            return
        if not weight.ndim or known(weight.shape[-1] != x.shape[-1]) or any(known(n != 1) for n in weight.shape[:-1]):
            raise ValueError(
                f"weight must have a number for each of the {x.shape[-1]} elements of a row, got {list(weight.shape)}"
            )
        if not weight.dtype.is_floating_point or weight.device != x.device:
            raise TypeError(f"weight must be floating point on {x.device}, got {weight.dtype} on {weight.device}")

    def run(self, dtype: torch.dtype, launch: Callable[..., None], *variant: Hashable) -> str | None:
        """`launch(kernels, rows of x, weight)`: None where it ran, or why the kernel does not take the call."""
        x, weight, size = self.x, self.weight, self.x.shape[-1]
        if x.dtype not in SOURCES or dtype not in CODES:
            return f"the kernel has no {quant.dtype_name(x.dtype)} to {quant.dtype_name(dtype)}"
        if size > LARGEST_ROW:
            return f"the kernel has rows of up to {LARGEST_ROW}, not of {size}"
        if (why := KERNEL.why_not_on(x.device)) is not None:
            return why
        rows = x.reshape(-1, size)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        weight = None if weight is None else weight.reshape(-1).contiguous()
        described = None if weight is None else weight.dtype
        return KERNEL.run(
            lambda kernels: launch(kernels, rows, weight), x.device, x.dtype, dtype, size, described, *variant
        )


@dataclass(frozen=True, eq=False)
class RMSNormQuantArguments(_Norm):
    """``saturate(y / (scale * scale_factor))`` of ``y = x * (mean(x ** 2) + eps) ** -0.5 * (weight + weight_offset)``.

    x: [..., hidden], bf16, fp16 or fp32; normalised over the last dimension, in fp32.
    weight: hidden numbers, floating point, [hidden] or with ones in front; None: 1, whatever the offset.
    scale: fp32, one element; None: 1.  scale_inverse: the scale times its factor multiplies y, instead of dividing it.

    Returns [..., hidden], contiguous.  NaN stays NaN; what is too large for FP8 saturates.  Codes may be one step from
    those of separate operators, which round y to x's dtype.

    Raises ValueError, or TypeError for a dtype, if the call cannot mean anything.
    """

    scale: Tensor | None = None
    _: KW_ONLY
    eps: float
    weight_offset: float = 0.0
    scale_factor: float = 1.0
    scale_inverse: bool = False
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        self.check(self.dtype)
        scale = self.scale
        if scale is not None and (known(scale.numel() != 1) or scale.dtype is not torch.float32):
            raise ValueError(f"scale must be one float32 element, got {scale.dtype} of shape {list(scale.shape)}")
        if scale is not None and scale.device != self.x.device:
            raise ValueError(f"scale is on {scale.device}, x on {self.x.device}: make the scale a buffer of the module")


@dataclass(frozen=True, eq=False)
class RMSNormGroupQuantArguments(_Norm):
    """The norm of ``rms_norm_quant``, quantized by the scales that ``quant.choose_scale`` gives for groups of
    `group_size` neighbours in the last dimension and the lower bound, at most the upper one.

    group_size: divides hidden; hidden itself for a scale per token.  The rest as in ``rms_norm_quant``.

    Returns codes [..., hidden] and fp32 scales [..., hidden / group_size], both contiguous.

    Raises ValueError, or TypeError for a dtype, if the call cannot mean anything.
    """

    _: KW_ONLY
    eps: float
    weight_offset: float = 0.0
    group_size: int
    scale_lower_bound: float | None = None
    scale_upper_bound: float | None = None
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        self.check(self.dtype)
        quant.check_lower_bound(self.scale_lower_bound)
        if self.group_size < 1 or known(self.x.shape[-1] % self.group_size != 0):
            raise ValueError(f"group_size must divide the {self.x.shape[-1]} elements of a row, got {self.group_size}")


def _fake(a: RMSNormQuantArguments) -> Tensor:
    return a.x.new_empty(a.x.shape, dtype=a.dtype)


def _cpu(a: RMSNormQuantArguments) -> Tensor:
    y = reference.rms_norm(a.x, a.weight, eps=a.eps, weight_offset=a.weight_offset)
    by = reference.product(a.scale_factor, a.scale)
    return quant.saturate(y * by if a.scale_inverse else y / by, a.dtype).contiguous()


def _cuda(a: RMSNormQuantArguments) -> Tensor:
    out = _fake(a)
    options = {"eps": a.eps, "weight_offset": a.weight_offset, "factor": a.scale_factor, "inverse": a.scale_inverse}

    def launch(kernels: ModuleType, rows: Tensor, weight: Tensor | None) -> None:
        kernels.by_scale(rows, weight, a.scale, out, **options)

    if out.numel() == 0 or (why := a.run(a.dtype, launch, a.scale is None, a.scale_inverse)) is None:
        return out
    say_slow("rms_norm_quant", "runs in plain torch", why, ADVICE)
    return _cpu(a)


def _fake_groups(a: RMSNormGroupQuantArguments) -> tuple[Tensor, Tensor]:
    *lead, size = a.x.shape
    scales = a.x.new_empty((*lead, size // a.group_size), dtype=torch.float32)
    return a.x.new_empty(a.x.shape, dtype=a.dtype), scales


def _cpu_groups(a: RMSNormGroupQuantArguments) -> tuple[Tensor, Tensor]:
    y = reference.rms_norm(a.x, a.weight, eps=a.eps, weight_offset=a.weight_offset)
    spec = quant.QuantSpec(a.dtype, "group", a.group_size, static=False)
    codes, scales = plain(y, spec, a.scale_upper_bound, a.scale_lower_bound)
    return codes.contiguous(), scales.contiguous()


def _cuda_groups(a: RMSNormGroupQuantArguments) -> tuple[Tensor, Tensor]:
    codes, scales = _fake_groups(a)
    options = {
        "eps": a.eps,
        "weight_offset": a.weight_offset,
        "smallest_scale": quant.SMALLEST_SCALE if a.scale_lower_bound is None else a.scale_lower_bound,
        "largest_scale": math.inf if a.scale_upper_bound is None else a.scale_upper_bound,
    }

    def launch(kernels: ModuleType, rows: Tensor, weight: Tensor | None) -> None:
        kernels.by_group(rows, weight, a.group_size, codes, scales, **options)

    if codes.numel() == 0:
        return codes, scales
    if a.group_size != a.x.shape[-1] and a.group_size.bit_count() != 1:
        why: str | None = f"the kernel has groups of a power of two or of a whole row, not of {a.group_size}"
    else:
        why = a.run(a.dtype, launch, a.group_size)
    if why is None:
        return codes, scales
    say_slow("rms_norm_quant", "runs in plain torch", why, ADVICE)
    return _cpu_groups(a)


rms_norm_quant = declare("rms_norm_quant", RMSNormQuantArguments, fake=_fake, cpu=_cpu, cuda=_cuda, kernels=(KERNEL,))
rms_norm_group_quant = declare(
    "rms_norm_group_quant",
    RMSNormGroupQuantArguments,
    fake=_fake_groups,
    cpu=_cpu_groups,
    cuda=_cuda_groups,
    returns=tuple[Tensor, Tensor],
    kernels=(KERNEL,),
)
