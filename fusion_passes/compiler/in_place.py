"""Reads of what an op is going to write, back in front of the write.

Before post-grad passes run, torch moves nodes towards what uses them, and a read of a KV cache can come behind a write
that it preceded in the program.  The graph is functional, so that is right; but to write in place Inductor must then
keep the old values, and copies the whole cache, there and back.

Only reads by kernels are moved: an op that Inductor does not look into, such as attention over the cache, reads where
it stands.  A pointwise read would stay pending, and see what was written (`effects`): there the copy stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from fusion_passes.graph.effects import Effects, memory, overwritten
from fusion_passes.graph.functional import is_functionalized
from fusion_passes.graph.read import META_ONLY, aten, calls, is_view, may_be_view, mutated_nodes


@dataclass(frozen=True)
class Reordered:
    """`write`: the wrapped op that writes; `reads`: what was moved in front of it."""

    write: Node
    reads: tuple[Node, ...]


def reads_before_writes(graph: Graph, effects: Effects) -> list[Reordered]:
    """Move each kernel that reads a value which is written later, with what it is computed from, in front of the write.

    Nothing is moved, and the copy stays, where a read needs what was written; where it is not a kernel's; or where some
    read, of this memory or another, would then be pending across a write.
    """
    found = []
    for write in [node for node in graph.nodes if is_functionalized(node)]:
        late = [user for base in overwritten(write) for user in _readers(base) if write < user]
        moved = sorted(_ancestors_behind(write, late))
        if not late or not _may_move(moved, late, write, effects):
            continue
        for node in moved:
            write.prepend(node)
        found.append(Reordered(write, tuple(late)))
    return found


def _may_move(moved: list[Node], late: list[Node], write: Node, effects: Effects) -> bool:
    """True where `moved`, among them the reads `late`, mean the same in front of `write`."""
    behind = _depending(write)
    if any(node in behind or _has_effects(node, effects) for node in moved):
        return False
    if any(effects.inlined(node) and not _is_alias(node) for node in late):
        return False
    overwrites = effects.writes([write])
    for node in moved:
        if effects.inlined(node) and not _is_alias(node):
            reads = effects.reads(node)
            if reads & overwrites or any(effects.writers(reads, write, node)):
                return False
    # Without the copy, what was pending across the write with it is no longer safe.
    return effects.pending(overwrites, write, leaving=moved) is None and effects.copied_onto_itself(overwrites) is None


def _is_alias(node: Node) -> bool:
    """True for a view: it reads nothing itself."""
    return bool(node.all_input_nodes) and memory(node) is memory(node.all_input_nodes[0])


def _readers(value: Node) -> Iterator[Node]:
    """What reads a value, or a view of it; not what only overwrites it or asks for its size."""
    for user in value.users:
        if calls(user, *META_ONLY) or (calls(user, aten.copy_.default) and user.args[0] is value):
            continue
        if is_view(user) or may_be_view(user):
            yield from _readers(user)
        yield user


def _depending(node: Node) -> set[Node]:
    """All that is computed from `node`, and itself."""
    found = {node}
    work = [node]
    while work:
        for user in work.pop().users:
            if user not in found:
                found.add(user)
                work.append(user)
    return found


def _ancestors_behind(write: Node, nodes: list[Node]) -> set[Node]:
    """`nodes` and all behind `write` that they are computed from."""
    found = set(nodes)
    work = list(nodes)
    while work:
        for source in work.pop().all_input_nodes:
            if write < source and source not in found:
                found.add(source)
                work.append(source)
    return found


def _has_effects(node: Node, effects: Effects) -> bool:
    writes = effects.writes([node]) or any(mutated_nodes(node))
    return node.op == "output" or bool(writes) or node.is_impure()
