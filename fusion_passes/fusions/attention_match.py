"""Places of `attention_quant`: an attention of either kind whose output is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch.fx import Node

from fusion_passes.graph.match import Match
from fusion_passes.graph.read import following_views
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.paged_attention import PagedAttention
from fusion_passes.idioms.quantize import Quantize


@dataclass(frozen=True, eq=False)
class AttentionMatch(Match):
    """An attention whose output a quantization takes."""

    attention: Attention | PagedAttention

    @property
    def site(self) -> Node:
        """The attention: it tells the layers of a model apart."""
        return self.attention.output


@dataclass(frozen=True, eq=False)
class StaticMatch(AttentionMatch):
    """`views` lead from the attention's output to the match's output, through and behind the quantization."""

    quantize: Quantize
    views: tuple[Node, ...]

    @classmethod
    def of(cls, attention: Attention | PagedAttention, before: tuple[Node, ...], quantize: Quantize) -> Self:
        """The match of an attention, the views behind it, and the quantization that takes them."""
        behind = following_views(quantize.output)
        return cls(
            output=behind[-1] if behind else quantize.output,
            nodes=attention.nodes | quantize.nodes | {*before, *behind},
            inputs=tuple(n for n in (*attention.inputs, quantize.scale) if n is not None),
            attention=attention,
            quantize=quantize,
            views=(*before, *quantize.views, *behind),
        )
