"""Attention, static FP8 quantization of its output, and the FP8 product that reads the codes.

The smallest model in which the fusion of attention with quantization can apply, and its hand-written ceiling. The
scales are neither 1 nor powers of two, and differ: a scale that is lost, inverted or applied twice changes the output.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_passes.nn import FP8Linear
from fusion_passes.ops import attention_quant
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.quant import quantize

HEADS = ((40, 8), (64, 8), (32, 8))  # query heads, key and value heads
HEAD_DIM = 128
BATCHES = (7, 256, 533)  # one a multiple of every block size, the others of none
DTYPES = (torch.bfloat16, torch.float16)

FP8 = torch.float8_e4m3fn
Quantize = Callable[[Tensor, Tensor], Tensor]


# Opaque stands for the quantization ops of other libraries, which the compiler cannot look into. It is not
# quantized_decomposed::quantize_per_tensor: that rounds to integers before it casts to FP8, and its tensor form does
# not compile to FP8 on a CPU (torch 2.13).
SPELLINGS: dict[str, Quantize] = {
    "plain": lambda x, scale: quantize(x, scale, FP8),
    "opaque": lambda x, scale: quantize_fp8(x, scale, FP8),
}


class AttentionFp8StaticQuantPatternModel(nn.Module):
    """Causal attention on the output of three projections, quantized, and the output projection in FP8.

    num_heads, num_kv_heads: of the query, and of key and value (grouped-query attention where they differ).
    quantize: `"plain"` torch, `"opaque"` as a custom op, or any function `(x, scale) -> codes`.
    out_features: of the projection; num_heads * head_dim if None.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int = HEAD_DIM,
        dtype: torch.dtype = torch.bfloat16,
        quantize: Literal["plain", "opaque"] | Quantize = "plain",
        *,
        out_features: int | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.dtype = num_heads, num_kv_heads, head_dim, dtype
        self.quantize = SPELLINGS[quantize] if isinstance(quantize, str) else quantize
        hidden = num_heads * head_dim
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(out_features or hidden, hidden, generator=generator)
        self.projection = FP8Linear(hidden, out_features or hidden, bias=False, device=device)
        self.projection.weight.copy_((weight * 40).clamp(-448, 448).to(FP8))
        self.projection.weight_scale.fill_(0.0037)
        self.projection.input_scale.fill_(0.0113)  # reaches 5.06; an average of standard normal values rarely does

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, return_codes: bool = False
    ) -> tuple[Tensor, ...] | Tensor:
        """query: [batch, seq, num_heads * head_dim]; key, value: [batch, seq, num_kv_heads * head_dim], in dtype.

        Returns [batch, seq, out_features] in dtype and, if return_codes, the fp8 input of the projection,
        [batch * seq, num_heads * head_dim].
        """
        batch, seq, _ = query.shape
        codes = self.codes(*(self.split_heads(x) for x in (query, key, value)))
        output = self.projection.matmul(codes, self.dtype).view(batch, seq, -1)
        return (output, codes) if return_codes else output

    def codes(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [batch, num_heads, seq, head_dim]. Returns fp8 [batch * seq, num_heads * head_dim]."""
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.quantize(attention.transpose(1, 2).reshape(-1, self.num_heads * self.head_dim), self.output_scale)

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, seq, heads * head_dim] to [batch, heads, seq, head_dim], without a copy."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    @property
    def grouped(self) -> bool:
        return self.num_heads != self.num_kv_heads

    @property
    def output_scale(self) -> Tensor:
        """The scale of the attention output: fp32 []."""
        return self.projection.input_scale

    def example_inputs(self, batch: int, seq: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Standard normal query, key and value on the model's device, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (
            torch.randn(batch, seq, heads * self.head_dim, generator=generator).to(self.output_scale.device, self.dtype)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )
        return query, key, value


class AttentionFp8StaticQuantFusedModel(AttentionFp8StaticQuantPatternModel):
    """The same with attention and quantization in one op, called by hand: what a pass can reach at best."""

    def codes(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As the unfused model's. The op writes [batch, seq, heads, head_dim], so that the reshape copies nothing."""
        codes = attention_quant(query, key, value, None, self.output_scale, is_causal=True, dtype=FP8)
        return codes.transpose(1, 2).reshape(-1, self.num_heads * self.head_dim)
