"""FP8 quantization as a layer, in two forms: plain torch, which Inductor fuses with its neighbours, or an opaque op."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from fusion_passes import custom_ops
from fusion_passes.ops import quantize_dynamic
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.quant import QuantSpec, check_lower_bound, quantize

Form = Literal["plain", "opaque"]

_FNUZ = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}
STATIC_E4M3 = QuantSpec()
FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")


def native_dtype(dtype: torch.dtype, device: torch.device | str | None = None) -> torch.dtype:
    """The form of an FP8 dtype that the device computes with: fnuz on AMD's gfx940 to gfx942, the same elsewhere."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return dtype
    if device is not None and torch.device(device).type != "cuda":
        return dtype
    architecture = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return _FNUZ.get(dtype, dtype) if architecture in FNUZ_ARCHITECTURES else dtype


class QuantFP8(nn.Module):
    """``x -> (codes, scale)`` as a QuantSpec says, in the form of its dtype that x's device computes with.

    On gfx940 to gfx942 that is fnuz. A static scale is used as it is given, so there it must be one for fnuz codes:
    twice what a checkpoint has for e4m3fn, whose bits mean twice as much.
    form: "plain" or "opaque"; None: plain, but opaque where the passes' settings ask for it,
    `PassConfig(custom_ops={"quant_fp8": True})`, and there is an op for the spec. They are read when the layer is
    traced, from the compilation that traces it; code compiled with other settings is compiled anew.
    scale_upper_bound: for dynamic scales: a larger one becomes this, and the values that it cannot hold saturate.
    scale_lower_bound: for dynamic scales: a smaller one becomes this; ``quant.SMALLEST_SCALE`` if None. With 0, as some
    models have it, the codes of what is all zeros are NaN.

    Raises ValueError if a bound comes with static scales, the upper one is not positive or less than the lower one, the
    lower one is negative or not finite, or there is no opaque op for the spec
    (static scales per token or group).
    """

    def __init__(
        self,
        spec: QuantSpec = STATIC_E4M3,
        *,
        form: Form | None = None,
        scale_upper_bound: float | None = None,
        scale_lower_bound: float | None = None,
    ) -> None:
        super().__init__()
        if form not in ("plain", "opaque", None):
            raise ValueError(f"form must be 'plain', 'opaque' or None, got {form!r}")
        self.lacks = f"static scales per {spec.granularity} have no opaque op"
        if not spec.static or spec.granularity == "tensor":
            self.lacks = ""
        if form == "opaque" and self.lacks:
            raise ValueError(f"{self.lacks}: use form='plain'")
        if scale_upper_bound is not None and (spec.static or not scale_upper_bound > 0.0):
            raise ValueError(f"scale_upper_bound must be positive and is for dynamic scales, got {scale_upper_bound}")
        if scale_lower_bound is not None and spec.static:
            raise ValueError(f"scale_lower_bound is for dynamic scales, got {scale_lower_bound}")
        check_lower_bound(scale_lower_bound)
        if scale_upper_bound is not None and scale_upper_bound < (scale_lower_bound or 0.0):
            raise ValueError(
                f"scale_upper_bound, {scale_upper_bound}, is less than scale_lower_bound, {scale_lower_bound}"
            )
        self.spec, self.form = spec, form
        self.scale_upper_bound, self.scale_lower_bound = scale_upper_bound, scale_lower_bound

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [..., hidden]. scale: fp32, given for static scales and only then, in the shape of ``choose_scale``.

        Returns FP8 codes [..., hidden] and the scale.
        """
        if self.spec.static != (scale is not None):
            raise ValueError("static scales are given with the call, dynamic ones are chosen by it")
        spec = self.spec
        if (dtype := native_dtype(spec.dtype, x.device)) != spec.dtype:
            spec = replace(spec, dtype=dtype)
        opaque = self.form == "opaque" or (self.form is None and custom_ops.is_on("quant_fp8", self.lacks))
        if scale is None:
            dynamic = quantize_dynamic.quantize_fp8_dynamic if opaque else quantize_dynamic.plain
            return dynamic(x, spec, self.scale_upper_bound, self.scale_lower_bound)
        if scale.device != x.device:
            raise ValueError(f"scale is on {scale.device}, x on {x.device}: make the scale a buffer of the module")
        if opaque:
            return quantize_fp8(x, scale, spec.dtype), scale
        return quantize(x, scale, spec.dtype), scale

    def extra_repr(self) -> str:
        bounds = {"scale_upper_bound": self.scale_upper_bound, "scale_lower_bound": self.scale_lower_bound}
        given = "".join(f", {name}={bound}" for name, bound in bounds.items() if bound is not None)
        return f"{self.spec}, form={self.form or 'as set'}{given}"
