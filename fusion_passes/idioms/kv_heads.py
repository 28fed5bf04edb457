"""Grouped queries: key and value before the graph repeats their heads, `repeat_kv`, `repeat_interleave` or `expand`."""

from __future__ import annotations

from torch.fx import Node

from fusion_passes.graph.read import aten, calls, same_shape, value
from fusion_passes.graph.region import Region, Term, run
from fusion_passes.idioms.reading import is_4d


def broadcast_heads(node: Node) -> Node | None:
    """The tensor with one head, [batch, 1, …], that `node` expands to several; None where it is no such thing."""
    source = repeated_from(node) if calls(node, aten.expand.default) else None
    return source if source is not None and source is node.args[0] else None


def unexpand(k: Node, v: Node) -> tuple[Node, Node]:
    """key and value before their heads are repeated, where both are repeated in the same way; else as they are."""
    few_k, few_v = repeated_from(k), repeated_from(v)
    if few_k is None or few_v is None or not same_shape(value(few_k).shape[:2], value(few_v).shape[:2]):
        return k, v
    return few_k, few_v


def repeated_from(node: Node) -> Node | None:
    """[batch, kv_heads, len, head_dim] that `node` repeats along the heads, each head next to its copies; or None.

    It is the nearest tensor with fewer heads; of which of them each head is a copy, the region between tells when run.
    """
    if not is_4d(node):
        return None
    region = Region(node, before=1, after=2)
    heads, source = region.inner(node), region.rearranged_from(node)
    while source is not None and not (is_4d(source) and region.is_whole(source) and region.inner(source) < heads):
        source = region.rearranged_from(source)
    if source is None:
        return None
    times = heads[0] // region.inner(source)[0]
    grouped = tuple((Term(head // times, 1),) for head in range(heads[0]))
    return source if run(region.program(source).program) == grouped else None
