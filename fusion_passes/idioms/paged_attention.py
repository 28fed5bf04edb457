"""PagedAttention: attention over a paged KV cache, as the library's own op computes it.

The op of the graph is the idiom, with its arguments by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from fusion_passes.graph.functional import op_call
from fusion_passes.graph.read import is_tensor
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.reading import read_all

NAME = "fusion_passes::paged_attention"


@dataclass(frozen=True, eq=False)
class PagedAttention(Idiom):
    """`output = paged_attention(**arguments)`, [tokens, heads, head_dim]; the names are those of the op's schema."""

    arguments: dict[str, Any]

    @property
    def query(self) -> Node:
        """[tokens, heads, head_dim]."""
        query: Node = self.arguments["query"]
        return query

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors it reads."""
        return tuple(x for x in self.arguments.values() if is_tensor(x))


def recognize(graph: Graph) -> Iterator[PagedAttention | NearMiss]:
    """Every call of the op.  Never raises."""
    return read_all(graph, "paged_attention", _read)


def _read(node: Node) -> PagedAttention | None:
    found = op_call(node, among=(NAME,))
    return None if found is None else PagedAttention(found.output, found.nodes, dict(found.arguments))
