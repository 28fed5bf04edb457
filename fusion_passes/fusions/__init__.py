"""The fusions, in the order in which they are tried: the most specific first."""

from typing import Any

from fusion_passes.fusions.attention_quant import AttentionQuant
from fusion_passes.rule import Rule

FUSIONS: tuple[Rule[Any], ...] = (AttentionQuant(),)
