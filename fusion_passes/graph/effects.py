"""When memory is read and written: order in the graph is not order of execution.

Inductor does not run a pointwise node where it stands.  It inlines the node into whatever uses it, and the memory is
read there.  Until then the read is pending.  Lowering a kernel that writes registers the kernel first and only then
realises the pending reads of what it overwrites, so these see the new values (docs/inductor-pending-reads.md has a
program against torch alone).  A functionalised write is safe only as long as something forces Inductor to copy, or all
that reads the old values comes to an end before it.

The rule that everything here serves: a read counts from where it stands to its last use, through every op that Inductor
may inline and through every view.  A rewrite is right if no write to the same memory lies in that stretch that did not
lie there before.

An op ends a read if it is sure to be a kernel of its own: it realises its inputs where it stands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch.fx import Graph, Node

from fusion_passes.graph.functional import schema_name, written_tensor, written_tensors
from fusion_passes.graph.read import META_ONLY, aten, calls, is_view, mutated_nodes, storage_root

_SCATTERS = frozenset(
    {
        "aten::index_put",
        "aten::_unsafe_index_put",
        "aten::index_copy",
        "aten::index_add",
        "aten::scatter",
        "aten::scatter_add",
        "aten::scatter_reduce",
        "aten::slice_scatter",
        "aten::select_scatter",
        "aten::diagonal_scatter",
        "aten::as_strided_scatter",
    }
)
"""Functional ops that Inductor may run on their first argument's memory, where nothing reads the old values later."""


def overwritten(node: Node) -> tuple[Node, ...]:
    """The tensors whose memory `node` writes to, or may once Inductor has undone functionalisation.

    Not those of `copy_`: Inductor realises what reads the old values before it registers a copy.
    """
    if node.op != "call_function" or calls(node, aten.copy_.default):
        return ()
    if schema_name(node) in _SCATTERS:
        return tuple(node.all_input_nodes[:1])
    return (*written_tensors(node), *mutated_nodes(node))


def memory(node: Node) -> Node:
    """The node whose memory `node` has or may come to share: up through views, and from what a functionalised write
    returns to the tensor that it writes to."""
    while (source := _shares_with(node)) is not None:
        node = source
    return node


def _shares_with(node: Node) -> Node | None:
    """A node above that `node` shares memory with, or may come to; None where it has memory of its own."""
    if calls(node, aten.copy_.default) or schema_name(node) in _SCATTERS:
        return node.all_input_nodes[0]
    if (written := written_tensor(node)) is not None:
        return written
    root = storage_root(node)
    return None if root is node else root


def source_of(node: Node) -> Node:
    """The call that made `node`: up through views, and from one of several results."""
    while True:
        source = storage_root(node)
        if source.target is not operator.getitem and not (is_view(source) and source.all_input_nodes):
            return source
        node = source.all_input_nodes[0]


class Effects:
    """The writes of a graph, and what reads the memory that they write to.

    Sets of memories are ints, one bit for each memory that is written anywhere in the graph.  Rewriting the graph does
    not make this untrue, as long as `replaced` is told.
    """

    def __init__(self, graph: Graph, may_inline: Callable[[Any], bool]) -> None:
        """may_inline: whether Inductor may put what a call's target computes into the code of what uses it."""
        self._may_inline = may_inline
        self._inlined: dict[Any, bool] = {}
        self._memory: dict[Node, Node] = {}
        self._writes: dict[Node, int] = {}
        self._bits: dict[Node, int] = {}
        self._reads: dict[Node, int] = {}
        self._copies: dict[Node, None] = {}
        self._add(graph.nodes)

    def replaced(self, old: Iterable[Node], new: Iterable[Node], results: Iterable[Node]) -> None:
        """The nodes `new`, with these results, have taken the place of `old`."""
        known = len(self._bits)
        memory_moved = False
        for node in old:
            self._writes.pop(node, None)
            memory_moved |= node in self._bits
        self._add(new)
        if memory_moved:
            self._look_again()
        # What is computed from a kernel's result has nothing more to read than it had.
        elif len(self._bits) > known or any(self.inlined(source_of(node)) for node in results):
            self._reads.clear()

    def _look_again(self) -> None:
        """What a write was to is another node's memory now."""
        writes = list(self._writes)
        for known in (self._writes, self._bits, self._reads, self._memory):
            known.clear()
        self._add(node for node in writes if not node._erased)

    def _add(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if calls(node, aten.copy_.default):
                self._copies[node] = None
            for tensor in overwritten(node):
                bit = self._bits.setdefault(self._root(tensor), 1 << len(self._bits))
                self._writes[node] = self._writes.get(node, 0) | bit

    def _root(self, node: Node) -> Node:
        """`memory`, looked up once."""
        path = []
        while (root := self._memory.get(node)) is None:
            path.append(node)
            source = _shares_with(node)
            if source is None:
                root = node
                break
            node = source
        self._memory.update(dict.fromkeys(path, root))
        return root

    @property
    def any(self) -> bool:
        """True where something in the graph writes."""
        return bool(self._writes)

    def inlined(self, node: Node) -> bool:
        """True where `node` may be computed later than where it stands, by what uses it."""
        if node.op != "call_function":
            return False
        if (known := self._inlined.get(node.target)) is None:
            known = self._inlined[node.target] = self._may_inline(node.target)
        return known

    def writes(self, nodes: Iterable[Node]) -> int:
        """The memory that `nodes` write to."""
        bits = 0
        for node in nodes:
            bits |= self._writes.get(node, 0)
        return bits

    def reads(self, node: Node) -> int:
        """What may be read when the value of `node` is used: its own memory, and what pending reads on the way to it
        still have to read.  Of memory that is written somewhere in the graph."""
        work = [node] if self._bits else []
        while work:
            current = work[-1]
            sources = current.all_input_nodes if self.inlined(current) else []
            missing = [source for source in sources if source not in self._reads]
            if missing:
                work += missing
                continue
            bits = self._bits.get(self._root(current), 0)
            for source in sources:
                bits |= self._reads[source]
            self._reads[current] = bits
            work.pop()
        return self._reads.get(node, 0)

    def writers(self, bits: int, after: Node, before: Node) -> Iterator[Node]:
        """What writes to some of this memory between two nodes, in no order."""
        for node, written in self._writes.items():
            if written & bits and not node._erased and after < node and node < before:
                yield node

    def last_use(self, node: Node) -> Node:
        """Where the value of `node`, if it is inlined, is computed last: its last user, through what is inlined."""
        return max(self._uses(node, frozenset()), default=node)

    def pending(
        self, bits: int, place: Node, leaving: Collection[Node] = (), behind: Collection[Node] = ()
    ) -> Node | None:
        """A read of this memory that stands before `place` and may come after it, since it is inlined into something
        that stands behind `place`.  None without one.

        leaving: nodes that will not be there, neither as reads nor as uses.  behind: nodes that will stand behind.
        """
        leaving = frozenset(leaving)
        for root in [root for root, bit in self._bits.items() if bit & bits]:
            for reader in {user for alias in self._aliases(root) for user in alias.users}:
                if reader in leaving or reader in behind or place < reader or reader is place:
                    continue
                if self._root(reader) is root or not self.inlined(reader) or calls(reader, *META_ONLY):
                    continue  # a view is the memory itself, and is looked at as such
                if any(place < use or use in behind for use in self._uses(reader, leaving)):
                    return reader
        return None

    def copied_onto_itself(self, bits: int) -> Node | None:
        """A `copy_` to some of this memory of what is computed from it, in one kernel: `s.copy_(s.flip(0))`.  Once a
        write before it is in place, the kernel reads what it has overwritten; a copy for another reason hides that."""
        for node in self._copies:
            onto, source = node.args[:2]
            if isinstance(onto, Node) and isinstance(source, Node):
                bit = self._bits.get(self._root(onto), 0) & bits
                if bit and self._root(source) is not self._root(onto) and self.reads(source) & bit:
                    return node
        return None

    def _uses(self, node: Node, leaving: frozenset[Node]) -> Iterator[Node]:
        """Where the value of `node` may be computed: all that uses it, through what is inlined."""
        seen, work = {node, *leaving}, [node]
        while work:
            for user in work.pop().users:
                if user not in seen and not calls(user, *META_ONLY):
                    seen.add(user)
                    yield user
                    if self.inlined(user):
                        work.append(user)

    def _aliases(self, root: Node) -> set[Node]:
        """All nodes that have, or may come to share, the memory of `root`."""
        found, work = {root}, [root]
        while work:
            for user in work.pop().users:
                for node in (user, *(user.users if overwritten(user) else ())):
                    if node not in found and self._root(node) is root:
                        found.add(node)
                        work.append(node)
        return found
