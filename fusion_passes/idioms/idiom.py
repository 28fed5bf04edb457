"""What recognition gives: idioms, and what nearly was one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch.fx import Graph, Node


@dataclass(frozen=True, eq=False)
class Idiom:
    """What a group of nodes computes.

    `output` is the node that holds the result; `nodes` are the nodes that compute it and nothing else (what a
    replacement makes dead), `output` among them.  Nodes that only prepare an input (the reciprocal of a scale, the
    expansion of a mask or of KV heads) may be shared and are not in `nodes`.
    """

    output: Node
    nodes: frozenset[Node]

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True, eq=False)
class NearMiss:
    """Something that looked like an idiom, or like the place for a fusion, and why it is none."""

    node: Node
    what: str
    reason: str
    told: Node | None = None
    """The node of another near miss, which needs no line of its own: this one's reason says it."""


T = TypeVar("T", bound=Idiom)


class Idioms:
    """The idioms of one graph: by kind (`idioms.of(Quantize)`) and by the node that holds the result
    (`idioms.at(n)`)."""

    def __init__(self, graph: Graph, found: list[Idiom], near_misses: list[NearMiss]) -> None:
        self.graph = graph
        self._found = found
        self._by_output = {idiom.output: idiom for idiom in found}
        self.near_misses = near_misses

    def of(self, kind: type[T]) -> Iterator[T]:
        """The idioms of one kind in graph order."""
        return (idiom for idiom in self._found if isinstance(idiom, kind))

    def at(self, node: Node, kind: type[T]) -> T | None:
        """The idiom of this kind whose result `node` holds, or None."""
        idiom = self._by_output.get(node)
        return idiom if isinstance(idiom, kind) else None

    def __iter__(self) -> Iterator[Idiom]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
