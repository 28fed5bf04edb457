"""A fusion of your own, outside the library: SiLU(gate) * up → static FP8 quantization, as one op of yours."""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_passes
from fusion_passes.quant import quantize


@torch.library.custom_op("examples::silu_mul_quant", mutates_args=())
def silu_mul_quant(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """Your kernel goes here; this one is plain torch in fp32."""
    return quantize(F.silu(gate.float()) * up.float(), scale)


@silu_mul_quant.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(gate, dtype=torch.float8_e4m3fn)


def unfused(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """As a feed-forward layer and the FP8Linear behind it compute it: codes [tokens, features]."""
    return quantize((F.silu(gate) * up).reshape(-1, gate.shape[-1]), scale)


def fused(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return torch.ops.examples.silu_mul_quant(gate, up, scale).reshape(-1, gate.shape[-1])


GATE, UP = torch.empty(2, 2, 16, dtype=torch.bfloat16).unbind()
RULE = fusion_passes.TracedRule(
    name="silu_mul_quant", search=unfused, replace=fused, example_inputs=(GATE, UP, torch.empty(()))
)
