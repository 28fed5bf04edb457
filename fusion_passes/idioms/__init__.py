"""Recognise: what the graph means, as values.  Nothing here edits a graph.

An idiom says what a group of nodes computes, with every attribute that a replacement could lose, whichever way it was
spelled.  Rules (`fusion_passes.fusions`) speak of idioms and never see spellings; so a new spelling is a change in one
idiom file, and a new fusion is one rule.

An idiom file holds the dataclass, its reference in plain torch, and `recognize(graph)`, which yields idioms and near
misses.  Its spellings (plain torch functions, the documentation and the test cases at once) stand in `spellings/`.
A chain is read as a grammar over `graph.steps`.
"""

from __future__ import annotations

from torch.fx import Graph

from fusion_passes.idioms import attention, attention_math, group_quantize, kv_cache, paged_attention, quantize, rope
from fusion_passes.idioms.idiom import Idiom, Idioms, NearMiss

__all__ = ["Idiom", "Idioms", "NearMiss", "recognize"]


def recognize(graph: Graph) -> Idioms:
    """All idioms of a post-grad graph.  The graph is not changed."""
    items: list[Idiom | NearMiss] = [*attention.recognize(graph), *attention_math.recognize(graph)]
    items += [*paged_attention.recognize(graph), *rope.recognize(graph), *kv_cache.recognize(graph)]
    dynamic = list(group_quantize.recognize(graph))
    told = {item.output if isinstance(item, Idiom) else item.node for item in dynamic}
    items += [*dynamic, *quantize.recognize(graph, apart_from=told)]
    found = [item for item in items if isinstance(item, Idiom)]
    near_misses = [item for item in items if isinstance(item, NearMiss)]
    found.sort(key=lambda idiom: idiom.output)
    return Idioms(graph, found, near_misses)
