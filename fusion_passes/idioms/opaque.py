"""Ops that quantize in one call and that Inductor does not look into: which they are, and what exactly they compute.

By name, so that the packages that define them need not be there.  An op is listed only where all of its formula is
known: division or multiplication by the reciprocal, rounded, of the scale; what becomes of NaN; on which device.

Not listed: TensorRT-LLM's `static_quantize_e4m3_per_tensor` (divides in one version, multiplies in the next);
`sgl_kernel::sgl_per_tensor_quant_fp8` (its schema does not say that it writes); FBGEMM's and TransformerEngine's (their
rounding depends on options that the call does not show).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node


@dataclass(frozen=True)
class OpaqueOp:
    """`saturate(input / scale)` to the dtype of the result, in fp32.

    input, scale: names of its arguments; the scale has one element.
    result: name of the argument that it writes the codes to; "" for an op that returns them.
    multiplies: by `1 / scale`, rounded to fp32, where others divide.
    keeps_nan: False where NaN becomes the largest code, as CUDA's fmin has it.
    device: where this is what it computes; None for everywhere.
    """

    input: str
    scale: str
    result: str = ""
    multiplies: bool = False
    keeps_nan: bool = True
    device: str | None = None

    def unread(self, arguments: Mapping[str, object], defaults: Mapping[str, object]) -> str:
        """What a call says beyond the formula, as `name=value`: an argument of another name that is not left at its
        default, and no dtype, which the result tells; "" where there is none."""
        known = (self.input, self.scale, self.result)
        others = {name: said for name, said in arguments.items() if name not in known}
        for name, said in others.items():
            if not isinstance(said, torch.dtype) and (isinstance(said, Node) or said != defaults.get(name)):
                return f"{name}={said}"
        return ""


OPAQUE: dict[str, OpaqueOp] = {
    # ops/quantize.py
    "fusion_passes::quantize_fp8": OpaqueOp("x", "scale"),
    # torchao, quantization/quant_primitives.py.  Where torchao has registered its lowering, Inductor knows the op.
    "torchao::quantize_affine_float8_non_decomposed": OpaqueOp("tensor", "scale"),
    # vLLM, csrc/quantization/w8a8/fp8/common.cu and common.cuh.  On the CPU it divides.
    "_C::static_scaled_fp8_quant": OpaqueOp(
        "input", "scale", result="result", multiplies=True, keeps_nan=False, device="cuda"
    ),
}
