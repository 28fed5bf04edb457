"""PagedAttention: attention over a paged KV cache, as the library's own op computes it.

The op of the graph is the idiom: with arguments by name, so that a rule can give it others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_passes.graph.functional import op_call
from fusion_passes.graph.match import Call
from fusion_passes.graph.read import is_tensor
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.reading import read_all

NAME = "fusion_passes::paged_attention"


@dataclass(frozen=True, eq=False)
class PagedAttention(Idiom):
    """`output = paged_attention(**arguments)`, [tokens, heads, head_dim]; the names are those of the op's schema."""

    arguments: Mapping[str, Any]

    @property
    def query(self) -> Node:
        """[tokens, heads, head_dim]."""
        query: Node = self.arguments["query"]
        return query

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors it reads."""
        return tuple(x for x in self.arguments.values() if is_tensor(x))

    def with_arguments(self, call: Call, op: Any = None, **changed: Any) -> Node:
        """A call of the op, or of another one with the same arguments, with some of them changed."""
        op = torch.ops.fusion_passes.paged_attention.default if op is None else op
        given = {**self.arguments, **changed}
        schema = op._schema.arguments
        positional = [given[a.name] for a in schema if not a.kwarg_only]
        named = {a.name: given[a.name] for a in schema if a.kwarg_only and given[a.name] != a.default_value}
        while positional and positional[-1] is None:
            positional.pop()
        return call(op, *positional, **named)


def recognize(graph: Graph) -> Iterator[PagedAttention | NearMiss]:
    """Every call of the op.  Never raises."""
    return read_all(graph, "paged_attention", _read)


def _read(node: Node) -> PagedAttention | None:
    found = op_call(node, among=(NAME,))
    return None if found is None else PagedAttention(found.output, found.nodes, found.arguments)
