"""Editing a graph for a rule: add calls with their meta values, check what replaces what, erase what died.

The checks here hold for every rule, so no rule can forget them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from fusion_passes.graph.effects import Effects, source_of
from fusion_passes.graph.functional import fake_result
from fusion_passes.graph.match import DeclinedError, Match
from fusion_passes.graph.read import (
    META_ONLY,
    aten,
    calls,
    is_tensor,
    mutated_nodes,
    outside_users,
    reading,
    same_layout,
    same_shape,
    target_name,
    value,
)
from fusion_passes.graph.symbolic import known

PROVENANCE = ("stack_trace", "nn_module_stack", "original_aten", "from_node", "custom", "mutation_region_id")
"""Meta entries that a new node takes over from the one it replaces."""


class Insertion:
    """New nodes before the last of `outputs`, which they are to replace; `undo` takes them out again."""

    def __init__(self, graph: Graph, outputs: Iterable[Node], replaced: Mapping[Node, Node]) -> None:
        """replaced: what took whose place before in this graph; a match was found before that, and may name the old."""
        self.graph = graph
        self.output = max(outputs)
        self.replaced = replaced
        self._added: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add a call, with its fake value, the layout of its arguments and `output`'s provenance.

        Inductor lays out what it computes as it likes.  Only for a node that says which values went into it in the
        graph does it keep their strides, where the op asks for that (`needs_exact_strides`, the default of custom
        ops): so that a kernel gets the layout that its rule has judged.

        Raises DeclinedError where an argument is computed after `output`, or the graph carries no fake tensors.
        """
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: self.replaced.get(n, n))
        with self.graph.inserting_before(self.output):
            node = self.graph.call_function(target, args, kwargs)
        self._added.append(node)
        for source in node.all_input_nodes:
            if source not in self._added and not source < self.output:
                raise DeclinedError(f"{source.name} is computed after {self.output.name}")
        mode = detect_fake_mode([n.meta.get("val") for n in node.all_input_nodes or [self.output]])
        if mode is None:
            raise DeclinedError("this graph carries no fake tensors, so shapes cannot be checked")
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = fake_result(target, fake_args, fake_kwargs)
        node.meta["eager_input_vals"] = (fake_args, fake_kwargs)
        node.meta.update({key: self.output.meta[key] for key in PROVENANCE if key in self.output.meta})
        return node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What was added."""
        return tuple(self._added)

    def reads(self) -> set[Node]:
        """What the added nodes read that was in the graph before."""
        return {source for node in self._added for source in node.all_input_nodes} - {*self._added}

    def undo(self) -> None:
        """Erase all added nodes."""
        for node in reversed(self._added):
            self.graph.erase_node(node)
        self._added.clear()


def check_readers(m: Match) -> None:
    """Decline where something that the fusion removes is read elsewhere, or outputs are needed for each other."""
    for node, user in outside_users(m.nodes, m.outputs):
        raise DeclinedError(f"{node.name} ({target_name(node)}) {reading(node, user)}: fusing would compute it twice")
    for node in m.inputs:
        if node in m.outputs:
            raise DeclinedError(
                f"{node.name} ({target_name(node)}) is one output and needed for another: "
                "the fused op computes all at once"
            )
    for node in early_readers(m):
        if any(user in m.nodes for user in node.users):
            raise DeclinedError(
                f"{node.name} ({target_name(node)}) is made of one output and needed for another: "
                "the fused op computes all at once"
            )


def check_order(m: Match, new: Mapping[Node, Node], insertion: Insertion, effects: Effects) -> None:
    """Decline where the replacement might read something after it is written to, which the graph reads before, or
    write before something else has read: see `effects`.

    new: what `replacements` gives.
    """
    last = max(m.outputs)
    early = early_readers(m)
    for node in early:
        reads = [source for source in node.all_input_nodes if source not in m.outputs]
        if any(mutated_nodes(node)) or effects.writes([node]) or _written_between(reads, node, last, m, effects):
            raise DeclinedError(
                f"{node.name} ({target_name(node)}) reads an output before {last.name} is computed, and what is "
                "written in between keeps it there"
            )
    if not effects.any:
        return
    # An output that Inductor inlines is computed where it is used, not where it stands.
    ends = (effects.last_use(output) for output, result in new.items() if effects.inlined(source_of(result)))
    end = max((last, *ends))
    firsts = _first_readers(m)
    for node in {*m.inputs, *insertion.reads()}:
        first = firsts.get(node, min(m.nodes))
        if (writer := _written_between([node], first, end, m, effects)) is not None:
            raise DeclinedError(
                f"{writer.name} ({target_name(writer)}) writes to an input between {first.name} and {end.name}"
            )
    overwrites = effects.writes(m.nodes)
    if overwrites and (reader := effects.pending(overwrites, last, leaving=m.nodes, behind=early)) is not None:
        raise DeclinedError(
            f"{reader.name} ({target_name(reader)}) reads what the fused op overwrites, and may be computed after it"
        )
    if overwrites and (copy := effects.copied_onto_itself(overwrites)) is not None:
        raise DeclinedError(
            f"{copy.name} ({target_name(copy)}) overwrites what the fused op writes to by what is computed from it"
        )


def _written_between(nodes: Iterable[Node], first: Node, last: Node, m: Match, effects: Effects) -> Node | None:
    """What is no part of the match and writes, behind `first` and before `last`, to what is read with `nodes`."""
    bits = 0
    for node in nodes:
        bits |= effects.reads(node)
    writers = (writer for writer in effects.writers(bits, first, last) if writer not in m.nodes)
    return min(writers, default=None)


def _first_readers(m: Match) -> dict[Node, Node]:
    """For each input of the match the earliest node that reads it on the way to the output: in the match, or in what
    prepares an input for it and the replacement reads past (the reciprocal of a scale, the expansion of KV heads)."""
    inputs = set(m.inputs)
    seen = set(m.nodes)
    work = list(m.nodes)
    first: dict[Node, Node] = {}
    while work:
        node = work.pop()
        for source in node.all_input_nodes:
            if source in inputs:
                first[source] = min(first.get(source, node), node)
            elif source not in seen and source.op == "call_function":
                seen.add(source)
                work.append(source)
    return first


def early_readers(m: Match) -> list[Node]:
    """What is computed from outputs of the match before its last output is, in graph order: where the outputs come all
    at once, at the place of the last, these nodes must come behind it."""
    last = max(m.outputs)
    found: set[Node] = set()
    work = [*m.outputs]
    while work:
        for user in work.pop().users:
            if user < last and user not in m.nodes and user not in found:
                found.add(user)
                work.append(user)
    return sorted(found)


def move_behind(m: Match, nodes: Iterable[Node]) -> None:
    """Move nodes, given in graph order, behind the last output."""
    place = max(m.outputs)
    for node in nodes:
        place.append(node)
        place = node


def sizes_of_inputs(m: Match, replaced: Mapping[Node, Node]) -> dict[Node, tuple[Node, int]]:
    """Who asks for a size of what the fusion removes, and an input of the match with the dimension that has this size.

    Declines where none has."""
    asking = [user for n in m.nodes if n not in m.outputs for user in n.users if calls(user, *META_ONLY)]
    found: dict[Node, tuple[Node, int]] = {}
    for user in sorted(set(asking) - m.nodes):
        wanted = user.meta.get("val")
        inputs = [x for x in (replaced.get(n, n) for n in m.inputs) if is_tensor(x) and x < user]
        dims = [(x, dim) for x in inputs for dim, size in enumerate(value(x).shape) if known(size == wanted)]
        if not dims:
            (node,) = user.all_input_nodes
            raise DeclinedError(
                f"{user.name} ({target_name(user)}) asks for a size of {node.name}, which the fusion removes, and no "
                "input of the fusion has that size"
            )
        found[user] = dims[0]
    return found


def ask_inputs(sizes: Mapping[Node, tuple[Node, int]]) -> None:
    """Let the nodes ask for the sizes that `sizes_of_inputs` found."""
    for user, size in sizes.items():
        user.target, user.args, user.kwargs = aten.sym_size.int, size, {}


def replacements(m: Match, results: Node | tuple[Node, ...]) -> dict[Node, Node]:
    """What a rule's `replacement` returned, by the output that it takes over.  Declines unless each can stand for it:
    same shape, strides, dtype and device."""
    news = results if isinstance(results, tuple) else (results,)
    if len(news) != len(m.outputs):
        raise ValueError(f"the replacement has {len(news)} results for {len(m.outputs)} outputs")
    pairs = dict(zip(m.outputs, news, strict=True))
    for old, new in pairs.items():
        _check_replacement(old, new)
    return pairs


def _check_replacement(old: Node, new: Node) -> None:
    before, after = value(old), value(new)
    if before.dtype != after.dtype or before.device != after.device:
        raise DeclinedError(
            f"the replacement gives {after.dtype} on {after.device}, the graph has {before.dtype} on {before.device}"
        )
    if not same_shape(before.shape, after.shape) or not same_layout(before, after):
        raise DeclinedError(
            f"the replacement has shape {tuple(after.shape)} and strides {after.stride()}, "
            f"the graph {tuple(before.shape)} and {before.stride()}"
        )


def erase_dead(covered: Iterable[Node]) -> None:
    """Erase the nodes that fusions took the place of, then what only they had used.

    Nothing else is looked at.  An op that writes to memory stays; so does one that draws random numbers, unless it is
    covered: SDPA counts as one although it drops nothing out.
    """
    covered = set(covered)
    work = [node for node in covered if not node.users]
    while work:
        node = work.pop()
        if node._erased or node.users or node.op not in ("call_function", "get_attr"):
            continue
        if any(mutated_nodes(node)) or (node not in covered and node.is_impure()):
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        work.extend(inputs)
