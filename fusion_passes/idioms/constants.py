"""Tensors that the graph computes from constants alone, such as the causal mask that a model builds from `arange`.

Reading every way to write such a mask is hopeless (Hugging Face's passes through cumulative sums and gathers); running
it is simple.  Nothing depends on an input, so the value while compiling is the value of every call.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from fusion_passes.graph.read import aten, calls, is_tensor, is_view, mutated_nodes, value

MAX_NODES = 200
MAX_BYTES = 2**31
"""Of all tensors on the way together, views not counted.  Some bool masks of 16384 x 16384 are that much, and take a
second or two; at 4096 x 4096 it is a tenth of a second."""

Kind = Literal["causal", "full", "other"]

_kinds: WeakKeyDictionary[Node, Kind | None] = WeakKeyDictionary()
"""The layers of a model share a mask, so it is run once."""


def kind(mask: Node) -> Kind | None:
    """What a bool mask [..., q_len, kv_len] is that is made from constants: "causal", the lower triangle aligned at the
    top left, in every batch and head; "full", True everywhere; "other".  None where it depends on an input or a
    symbolic size, or is too large to run."""
    if mask not in _kinds:
        _kinds[mask] = _kind(mask)
    return _kinds[mask]


def _kind(mask: Node) -> Kind | None:
    if not is_tensor(mask) or value(mask).dtype is not torch.bool or value(mask).ndim < 2:
        return None
    result = evaluate(mask)
    if result is None:
        return None
    for dim in range(result.ndim - 2):
        if result.stride(dim) == 0:  # an expanded batch need not be compared again and again
            result = result.narrow(dim, 0, min(1, result.shape[dim]))
    q_len, kv_len = result.shape[-2:]
    if torch.equal(result, torch.ones(q_len, kv_len, dtype=torch.bool).tril().expand_as(result)):
        return "causal"
    return "full" if bool(result.all()) else "other"


def evaluate(node: Node) -> Tensor | None:
    """The value of `node` on the CPU, where it is made from constants alone; else None."""
    order = _constant_ancestors(node)
    if order is None:
        return None
    last_use = {source: current for current in order for source in current.all_input_nodes}
    values: dict[Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for current in order:
            args, kwargs = torch.fx.node.map_arg((current.args, current.kwargs), values.__getitem__)
            if "device" in kwargs:
                kwargs = kwargs | {"device": torch.device("cpu")}
            values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
            for source in current.all_input_nodes:
                if last_use[source] is current:
                    del values[source]
    result = values[node]
    return result if isinstance(result, Tensor) else None


def _constant_ancestors(node: Node) -> list[Node] | None:
    """`node` and all that it is computed from, in order; None if an input, a symbolic size, a random number or a side
    effect is among it, or it is too much."""
    size = 0
    found: set[Node] = set()
    work = [node]
    while work:
        current = work.pop()
        if current in found:
            continue
        found.add(current)
        schema = getattr(current.target, "_schema", None)
        val = current.meta.get("val")
        if (
            current.op != "call_function"
            or schema is None
            or any(mutated_nodes(current))
            or torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ())
            or not isinstance(val, Tensor)
            or not all(isinstance(size, int) for size in val.shape)
        ):
            return None
        if not is_view(current) and not calls(current, aten.expand.default):
            size += val.numel() * val.element_size()
        if len(found) > MAX_NODES or size > MAX_BYTES:
            return None
        work.extend(current.all_input_nodes)
    return sorted(found)
