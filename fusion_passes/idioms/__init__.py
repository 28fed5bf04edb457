"""Recognise: what the graph means, as values.  Nothing here edits a graph.

An idiom says what a group of nodes computes, with every attribute that a replacement could lose, whichever way it was
spelled.  Rules (`fusion_passes.fusions`) speak of idioms and never see spellings; so a new spelling is a change in one
idiom file, and a new fusion is one rule.

An idiom file holds the dataclass, its reference in plain torch, and `recognize(graph)`, which yields idioms and near
misses.  Its spellings (plain torch functions, the documentation and the test cases at once) stand in `spellings/`.
A chain is read as a grammar over `graph.steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import Graph

from fusion_passes.idioms import (
    attention,
    attention_math,
    group_quantize,
    kv_cache,
    paged_attention,
    quantize,
    rms_norm,
    rope,
)
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.idiom import Idiom, Idioms, NearMiss, Reader
from fusion_passes.idioms.kv_cache import KVCacheWrite
from fusion_passes.idioms.paged_attention import PagedAttention
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.rms_norm import RMSNorm
from fusion_passes.idioms.rope import Rope

__all__ = ["Idiom", "Idioms", "NearMiss", "recognize"]


def recognize(graph: Graph) -> Idioms:
    """The idioms of a post-grad graph, all of them read.  The graph is not changed."""
    idioms = Idioms(graph, READERS)
    for kind in READERS:
        idioms.items(kind)
    return idioms


def _attention(idioms: Idioms) -> Iterator[Idiom | NearMiss]:
    yield from attention.recognize(idioms.graph)
    yield from attention_math.recognize(idioms.graph)


def _quantize(idioms: Idioms) -> Iterator[Idiom | NearMiss]:
    """Of what is a dynamic quantization, or nearly one, nothing more is said."""
    dynamic = idioms.items(GroupQuantize)
    told = {item.output if isinstance(item, Idiom) else item.node for item in dynamic}
    return quantize.recognize(idioms.graph, apart_from=told)


READERS: Mapping[type[Idiom], Reader] = {
    Attention: _attention,
    PagedAttention: lambda idioms: paged_attention.recognize(idioms.graph),
    Rope: lambda idioms: rope.recognize(idioms.graph),
    KVCacheWrite: lambda idioms: kv_cache.recognize(idioms.graph),
    RMSNorm: lambda idioms: rms_norm.recognize(idioms.graph),
    GroupQuantize: lambda idioms: group_quantize.recognize(idioms.graph),
    Quantize: _quantize,
}
"""What finds the idioms of each kind."""
