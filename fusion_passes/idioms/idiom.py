"""What recognition gives: idioms, and what nearly was one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    supersedes: Node | None = None
    """The node of another near miss, which needs no line of its own: this one's reason says it."""


T = TypeVar("T", bound=Idiom)


class Idioms:
    """The idioms of one graph: by kind (`idioms.of(Quantize)`) and by the node that holds the result
    (`idioms.at(n, Quantize)`).

    A kind is read when it is first asked for, so the graph must not change before the last question.  `unread` gives
    those of a graph that has changed.
    """

    def __init__(self, graph: Graph, readers: Mapping[type[Idiom], Reader]) -> None:
        """readers: what finds the idioms of a kind, and their near misses.  It may ask for another kind."""
        self.graph = graph
        self._readers = readers
        self._items: dict[type[Idiom], list[Idiom | NearMiss]] = {}
        self._at: dict[type[Idiom], dict[Node, Idiom]] = {}
        self._near_misses: list[NearMiss] | None = None

    @property
    def near_misses(self) -> list[NearMiss]:
        """Those of all kinds, in the user's graph: not in what fusions have made of it."""
        if self._near_misses is None:
            items = (item for kind in self._readers for item in self.items(kind))
            self._near_misses = [item for item in items if isinstance(item, NearMiss)]
        return self._near_misses

    def unread(self) -> Idioms:
        """The idioms of the graph as it is now, none of them read yet; and the near misses of the user's graph."""
        idioms = Idioms(self.graph, self._readers)
        idioms._near_misses = self.near_misses
        return idioms

    def of(self, kind: type[T]) -> Iterator[T]:
        """The idioms of one kind in graph order."""
        found = [idiom for each in self._kinds(kind) for idiom in self._by_output(each).values()]
        return iter(sorted((idiom for idiom in found if isinstance(idiom, kind)), key=lambda idiom: idiom.output))

    def at(self, node: Node, kind: type[T]) -> T | None:
        """The idiom of this kind whose result `node` holds, or None."""
        for each in self._kinds(kind):
            if isinstance(idiom := self._by_output(each).get(node), kind):
                return idiom
        return None

    def items(self, kind: type[Idiom]) -> list[Idiom | NearMiss]:
        """What the reader of this kind gives: idioms and near misses."""
        if kind not in self._items:
            self._items[kind] = list(self._readers[kind](self))
        return self._items[kind]

    def _kinds(self, kind: type[Idiom]) -> Iterable[type[Idiom]]:
        return (kind,) if kind in self._readers else [each for each in self._readers if issubclass(each, kind)]

    def _by_output(self, kind: type[Idiom]) -> dict[Node, Idiom]:
        if kind not in self._at:
            self._at[kind] = {idiom.output: idiom for idiom in self.items(kind) if isinstance(idiom, Idiom)}
        return self._at[kind]

    def __iter__(self) -> Iterator[Idiom]:
        return self.of(Idiom)

    def __len__(self) -> int:
        return sum(1 for _ in self)


Reader = Callable[[Idioms], Iterator[Idiom | NearMiss]]
"""Finds the idioms of one kind, and their near misses, in the graph of `idioms`."""
