"""Grouped queries: key and value before the graph repeats their heads, `repeat_kv`, `repeat_interleave` or `expand`."""

from __future__ import annotations

from torch.fx import Node

from fusion_passes.graph.read import aten, calls, is_noop, is_tensor, same_shape, value
from fusion_passes.graph.symbolic import known
from fusion_passes.idioms.reading import is_4d, without_copies


def broadcast_heads(node: Node) -> Node | None:
    """The tensor with one head, [batch, 1, …], that `node` expands to several; None where it is no such thing."""
    if not calls(node, aten.expand.default) or is_noop(node):
        return None
    source = node.all_input_nodes[0]
    if not (is_4d(source) and is_4d(node)):
        return None
    (batch, heads, *rest), (batch_out, _, *rest_out) = value(source).shape, value(node).shape
    return source if known(heads == 1) and same_shape([batch, *rest], [batch_out, *rest_out]) else None


def unexpand(k: Node, v: Node) -> tuple[Node, Node]:
    """key and value before their heads are repeated, where both are repeated in the same way; else as they are."""
    few_k, few_v = repeated_from(k), repeated_from(v)
    if few_k is None or few_v is None or not same_shape(value(few_k).shape[:2], value(few_v).shape[:2]):
        return k, v
    return few_k, few_v


def repeated_from(node: Node) -> Node | None:
    """[batch, kv_heads, len, head_dim] that `node` repeats along the heads, each head next to its copies; or None."""
    repeated = without_copies(node)
    if (source := broadcast_heads(repeated)) is not None:
        return source
    if not calls(repeated, aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    expanded = without_copies(repeated.all_input_nodes[0])
    if not (calls(expanded, aten.expand.default) and is_tensor(expanded) and value(expanded).ndim == 5):
        return None
    single = without_copies(expanded.all_input_nodes[0])
    if not calls(single, aten.unsqueeze.default, aten.reshape.default, aten.view.default):
        return None
    source = single.all_input_nodes[0]
    if not (is_4d(source) and is_4d(repeated)):
        return None
    batch, heads, length, head_dim = value(source).shape
    times = value(expanded).shape[2]
    if (
        same_shape(value(single).shape, [batch, heads, 1, length, head_dim])
        and same_shape(value(expanded).shape, [batch, heads, times, length, head_dim])
        and same_shape(value(repeated).shape, [batch, heads * times, length, head_dim])
    ):
        return source
    return None
