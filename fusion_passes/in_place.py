"""Reads of what an op is going to write, back in front of the write.

Before post-grad passes run, torch moves nodes towards what uses them, and a read of a KV cache can come behind a write
that it preceded in the program.  The graph is functional, so that is right; but to write in place Inductor must then
keep the old values, and copies the whole cache, there and back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from fusion_passes.graph import aten, calls, is_functionalized, is_view, mutated_nodes

META_ONLY = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)


@dataclass(frozen=True)
class Reordered:
    """`write`: the wrapped op that writes; `reads`: what was moved in front of it."""

    write: Node
    reads: tuple[Node, ...]


def reads_before_writes(graph: Graph) -> list[Reordered]:
    """Move each read of a value that is written later, with what it is computed from, in front of the write.

    Where one of the reads needs what was written, a copy is needed anyway, and nothing is moved.
    """
    found = []
    for write in [node for node in graph.nodes if is_functionalized(node)]:
        late = [user for base in _bases(write) for user in _readers(base) if write < user]
        if not late:
            continue
        behind = _depending(write)
        moved = sorted(_ancestors_behind(write, late))
        if any(node in behind or _has_effects(node) for node in moved):
            continue
        for node in moved:
            write.prepend(node)
        found.append(Reordered(write, tuple(late)))
    return found


def _bases(write: Node) -> list[Node]:
    """The values that the op overwrites."""
    bases = write.kwargs.get("_all_bases")
    if isinstance(bases, (list, tuple)):
        return [base for base in bases if isinstance(base, Node)]
    schema = write.args[0]._schema  # type: ignore[union-attr]
    written = [write.kwargs.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [base for base in written if isinstance(base, Node)]


def _readers(value: Node) -> Iterator[Node]:
    """What reads a value, or a view of it; not what only overwrites it or asks for its size."""
    for user in value.users:
        if calls(user, *META_ONLY) or (calls(user, aten.copy_.default) and user.args[0] is value):
            continue
        if is_view(user) or _may_be_view(user):
            yield from _readers(user)
        yield user


def _may_be_view(node: Node) -> bool:
    """True for an op whose result may share memory with its input, and for one of several such results."""
    if node.target is operator.getitem:
        return _may_be_view(node.all_input_nodes[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)


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


def _has_effects(node: Node) -> bool:
    return node.op == "output" or any(mutated_nodes(node)) or node.is_impure()
