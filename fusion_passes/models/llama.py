"""A Llama decoder in plain torch: RMSNorm, RoPE, grouped-query attention, SwiGLU. Prefill only, without a KV cache
(`paged_llama` has one).

`Llama(PRESETS["tiny"])` is made of nn.Linear; `to_fp8(model, tokens)` calibrates it and swaps them for FP8Linear.
`model.fuse()` then calls the fused ops by hand, which is what the passes can reach at best.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_passes.nn import FP8Linear, calibrate, quantize_
from fusion_passes.ops import attention_quant


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of RoPE: wavelengths longer than `original_context / low` become `factor` times as long,
    those shorter than `original_context / high` stay, and those between go from one to the other."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class Config:
    """Sizes of a model; its tokens are bytes unless said."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 256
    rope_base: float = 500_000.0
    eps: float = 1e-5
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # the head's weight is the embedding's
    context: int = 8192  # positions that a model with a KV cache has room for in its RoPE table


PRESETS = {
    "tiny": Config(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_dim=64),
    "1b": Config(2048, 8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128_256),
    "8b": Config(4096, 14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128_256),
    "70b": Config(8192, 28672, layers=80, heads=64, kv_heads=8, head_dim=128, vocab=128_256),
}


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps)` in fp32, rounded to x's dtype, times the weight."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention. `fused` makes the output FP8 in one op; it needs `o` to be an FP8Linear."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.grouped, self.fused = config.head_dim, config.heads != config.kv_heads, False
        self.q = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o: nn.Linear | FP8Linear = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (layer(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.fused:
            assert isinstance(self.o, FP8Linear)
            codes = attention_quant(q, k, v, None, self.o.input_scale, is_causal=True, dtype=self.o.weight.dtype)
            return self.o.matmul(codes.transpose(1, 2).reshape(batch * seq, -1), x.dtype).view(batch, seq, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer, with the norms before attention and MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.hidden, config.eps), Attention(config)
        self.mlp_norm, self.mlp = RMSNorm(config.hidden, config.eps), MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """forward: tokens [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rope_table(tokens.shape[1], self.config, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def fuse(self, on: bool = True) -> "Llama":
        """Call the fused ops by hand, or no longer. Raises ValueError before `to_fp8`."""
        for attention in (module for module in self.modules() if isinstance(module, Attention)):
            if on and not isinstance(attention.o, FP8Linear):
                raise ValueError("the output projections are not FP8 yet: call to_fp8 first")
            attention.fused = on
        return self


def rope_table(seq: int, config: Config, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, [seq, head_dim] each, on the device and in the dtype of `like`."""
    exponent = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float32) / config.head_dim
    frequency = config.rope_base**-exponent
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_context * frequency / (2 * math.pi)  # in the context that was trained on first
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        frequency = frequency * (kept + (1.0 - kept) / scaling.factor)
    angle = torch.outer(torch.arange(seq, device=like.device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on split halves (NeoX order). x: [..., head_dim]; cos, sin: [..., head_dim], broadcast against x."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def to_fp8(model: Llama, tokens: Tensor) -> Llama:
    """Swap every linear layer but the head for FP8Linear, in place, calibrated on tokens [batch, seq]."""
    quantize_(model, calibrate(model, lambda: model(tokens), filter=lambda name, _: name != "head"))
    return model
