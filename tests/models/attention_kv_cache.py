"""Attention over a KV cache, static FP8 quantization of its output, and the FP8 product that reads the codes.

``nn.Attention`` in the place that scaled_dot_product_attention has in ``attention_fp8_static_quant``: the smallest
model of a decoder's step in which the passes over the cache's ops can apply, for every backend, and its hand-written
ceiling. All scales differ, and none is 1.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fusion_passes import reference
from fusion_passes.nn import Attention, AttentionMetadata, FP8Linear
from tests.models.attention_fp8_static_quant import FP8, SPELLINGS, Quantize

HEADS = ((64, 8), (40, 8), (32, 8), (8, 1))  # query heads, key and value heads
HEAD_DIMS = (64, 128, 256)
BATCHES = (7, 256, 533)  # sequences
DTYPES = (torch.bfloat16, torch.float16)
SCALES = {"q_scale": 0.0171, "k_scale": 0.0137, "v_scale": 0.0093, "prob_scale": 0.0029}
OUTPUT_SCALE = 0.0057

Lengths = tuple[tuple[int, int], ...]
"""(new tokens, all tokens) of each sequence."""

# Repeated as often as there are sequences: one token, a decode after an odd number, one after 1k, and a mixture of
# prefill, decode, chunks of a prefill and a sequence that only pads the batch.
LENGTHS: dict[str, Lengths] = {
    "1": ((1, 1),),
    "odd": ((1, 3), (1, 37), (1, 131)),
    "1k": ((1, 1024),),
    "mixed": ((7, 7), (1, 131), (5, 21), (0, 0), (1, 1024), (1, 1), (33, 33)),
}
LONGEST, LONGEST_QUERY = 1024, 33
SHARED_PAGES = 64
"""Of a cache: they hold the past of many sequences."""


def lengths_of(kind: str, batch: int) -> Lengths:
    """The lengths of so many sequences: a key of LENGTHS."""
    pattern = LENGTHS[kind]
    return tuple(pattern[i % len(pattern)] for i in range(batch))


class AttentionKVCacheFp8StaticQuantPatternModel(nn.Module):
    """RoPE if asked for, attention with a cache, quantization of its output, and the output projection in FP8.

    num_heads, num_kv_heads: of the query, and of key and value (grouped-query attention where they differ).
    backend, kv_cache_dtype, quantize_query: of ``nn.Attention``.
    quantize: `"plain"` torch, `"opaque"` as a custom op, or any function `(x, scale) -> codes`.
    rope: rotate query and key by their positions, before they are quantized.
    """

    rope: Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        quantize: Literal["plain", "opaque"] | Quantize = "plain",
        *,
        backend: str = "auto",
        kv_cache_dtype: str = "fp8_e4m3",
        quantize_query: bool | None = None,
        rope: bool = False,
        window: int | None = None,
        softcap: float = 0.0,
        block_size: int = 64,
        out_features: int = 128,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.quantize = SPELLINGS[quantize] if isinstance(quantize, str) else quantize
        self.attention = Attention(
            *(num_heads, num_kv_heads, head_dim),
            window=window,
            softcap=softcap,
            kv_cache_dtype=kv_cache_dtype,
            backend=backend,
            block_size=block_size,
            quantize_query=quantize_query,
            device=device,
            dtype=dtype,
        )
        if self.attention.quantized:
            self.attention.set_scales(**SCALES)
        hidden = num_heads * head_dim
        weight = torch.randn(out_features, hidden, generator=torch.Generator().manual_seed(seed))
        self.projection = FP8Linear(hidden, out_features, bias=False, device=device)
        self.projection.weight.copy_((weight * 40).clamp(-448, 448).to(FP8))
        self.projection.weight_scale.fill_(0.0037)
        self.projection.input_scale.fill_(OUTPUT_SCALE)
        self.register_buffer("rope", rope_table(LONGEST, head_dim).to(device) if rope else None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        positions: Tensor | None = None,
        return_codes: bool = False,
    ) -> tuple[Tensor, ...] | Tensor:
        """query: [tokens, num_heads * head_dim]; key, value: [tokens, num_kv_heads * head_dim], in dtype.

        positions: int64 [tokens], each new token's place in its sequence, for RoPE.

        Returns [tokens, out_features] in dtype and, if return_codes, the fp8 input of the projection,
        [tokens, num_heads * head_dim].
        """
        query, key, value = (x.unflatten(-1, (-1, self.attention.head_dim)) for x in (query, key, value))
        if self.rope is not None:
            cos, sin = self.rope[positions][:, None].chunk(2, -1)
            rotary_dim = self.attention.head_dim
            query, key = (reference.rope(x, cos, sin, rotary_dim=rotary_dim).to(x.dtype) for x in (query, key))
        codes = self.codes(query, key, value, metadata)
        output = self.projection.matmul(codes, self.dtype)
        return (output, codes) if return_codes else output

    def codes(self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata) -> Tensor:
        """query: [tokens, num_heads, head_dim]. Returns fp8 [tokens, num_heads * head_dim]."""
        return self.quantize(self.attention(query, key, value, metadata).flatten(1), self.output_scale)

    @property
    def output_scale(self) -> Tensor:
        """The scale of the attention output: fp32 []."""
        return self.projection.input_scale

    def example_inputs(
        self, lengths: Sequence[tuple[int, int]], columns: int, seed: int = 1
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, Tensor]:
        """Standard normal inputs for such sequences, after the layer's cache was filled with a past, normal as well.

        The pages that a sequence writes to are its own, earlier ones are shared. Slots beyond a sequence's end are NaN
        where the backend leaves them alone. Allocates a cache if there is none, or too small a one.
        columns: of the block table, the same for calls that one graph is to serve.
        """
        attention, device = self.attention, self.output_scale.device
        generator = torch.Generator(device).manual_seed(seed)
        page = attention.block_size
        table = torch.randint(SHARED_PAGES, (len(lengths), columns), generator=torch.Generator().manual_seed(seed))
        pages = SHARED_PAGES
        for row, (new, length) in zip(table, lengths, strict=True):
            own = range((length - new) // page, -(-length // page))
            row[own.start : own.stop] = torch.arange(pages, pages + len(own))
            pages += len(own)
        cache = attention.kv_cache
        if cache is None or cache.pages < pages:
            cache = attention.allocate_cache(pages)
        for half, scale in ((cache.key, attention._k_scale), (cache.value, attention._v_scale)):
            normal = torch.randn(half.shape, generator=generator, device=device)
            half.copy_(reference.as_cached(normal, scale if attention.quantized else None, half.dtype))
            if attention.backend.ignores_hidden_values:
                ends = [(row[n // page], n % page) for row, (_, n) in zip(table, lengths, strict=True) if n % page]
                for last, used in ends:
                    reference.bits(half)[last, :, used:] = 127 if attention.quantized else torch.nan  # both NaN
        metadata = AttentionMetadata.from_lengths(
            *([new for new, _ in lengths], [length for _, length in lengths], table.to(device, torch.int32), page),
            max_query_len=LONGEST_QUERY,
        )
        heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        positions = [p for new, length in lengths for p in range(length - new, length)]
        packed = torch.randn(len(positions), sum(heads) * attention.head_dim, generator=generator, device=device)
        query, key, value = packed.to(self.dtype).split([n * attention.head_dim for n in heads], 1)
        return query, key, value, metadata, torch.tensor(positions, device=device)


class AttentionKVCacheFp8StaticQuantFusedModel(AttentionKVCacheFp8StaticQuantPatternModel):
    """The same with attention and quantization in one op, called by hand: what a pass can reach at best."""

    def codes(self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata) -> Tensor:
        """As the unfused model's. Only for backends with FP8 output."""
        out: Tensor = self.attention(query, key, value, metadata, output_scale=self.output_scale, output_dtype=FP8)
        return out.flatten(1)


def rope_table(positions: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Cosine and sine, one for each pair of dimensions: fp32 [positions, head_dim]."""
    half = head_dim // 2
    angle = torch.arange(positions)[:, None] * base ** (torch.arange(half) / -half)
    return torch.cat((angle.cos(), angle.sin()), 1)
