"""The library's own fusions, in the order in which they are tried.

What opens a graph for others comes first, then the most specific.
"""

from typing import Any

from fusion_passes.fusions.attention_quant import AttentionQuant
from fusion_passes.fusions.query_quant import QueryQuant
from fusion_passes.fusions.rope_quant_kv_write import RopeQuantKVWrite
from fusion_passes.fusions.rule import Rule

FUSIONS: tuple[Rule[Any], ...] = (QueryQuant(), RopeQuantKVWrite(), AttentionQuant())
