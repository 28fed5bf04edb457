"""What the readers of idioms share: how a reading fails, calls of opaque ops, and what a sentence calls things."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from torch.fx import Graph, Node

from fusion_passes.graph.arguments import arguments, tensor_node
from fusion_passes.graph.read import (
    ALIASES,
    COPIES,
    aten,
    calls,
    is_noop,
    is_tensor,
    value,
)
from fusion_passes.idioms.idiom import Idiom, NearMiss

log = logging.getLogger("fusion_passes")
FoundIdiom = TypeVar("FoundIdiom", bound=Idiom)


class Unread(Exception):
    """The reading stopped at `node`: the reason is a sentence for the user."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def read_all(
    graph: Graph, what: str, read: Callable[[Node], FoundIdiom | None], *, last_first: bool = False
) -> Iterator[FoundIdiom | NearMiss]:
    """What `read` finds at the calls of a graph, in graph order or the other way round, and where it stopped.  Never
    raises: a fault of `read` is logged, with its traceback."""
    for node in reversed(graph.nodes) if last_first else graph.nodes:
        if node.op != "call_function":
            continue
        try:
            found = read(node)
        except Unread as failure:
            yield NearMiss(node, what, failure.reason)
        except Exception as error:
            log.warning("fusion_passes: the reader of %s failed at %s", what, node.name, exc_info=error)
            yield NearMiss(node, what, f"could not be read: {error}")
        else:
            if found is not None:
                yield found


def reduced_along_last(node: Node, *targets: object) -> Node | None:
    """What a call of one of these reductions reduces along its last dimension alone, whether that is kept or not; None
    for anything else."""
    said = arguments(node, "self", "dim", "keepdim") if calls(node, *targets) else None
    source = tensor_node(said[0]) if said is not None else None
    if said is None or source is None:
        return None
    dims = list(said[1]) if isinstance(said[1], (list, tuple)) else [said[1]]
    return source if value(source).ndim and dims in ([-1], [value(source).ndim - 1]) else None


def ancestors(node: Node, levels: int | None = None, but_not: Collection[object] = ()) -> Iterator[Node]:
    """`node`, then what it is computed from, level by level: at most so many above it, and nothing that a call of
    `but_not` is computed from."""
    seen, level = {node}, [node]
    while level:
        yield from level
        if levels == 0:
            return
        levels = None if levels is None else levels - 1
        above = dict.fromkeys(x for n in level if not calls(n, *but_not) for x in n.all_input_nodes)
        level = [x for x in above if x not in seen]
        seen.update(level)


def depends_on(node: Node, target: Node) -> bool:
    """True where `node` is computed from `target`."""
    return target in ancestors(node)


def shape_of(node: Node) -> str:
    """The shape as a user reads it: `[s0, 1]`."""
    return "[" + ", ".join(str(size) for size in value(node).shape) + "]"


def is_start(sliced: Node) -> bool:
    """True for a slice that takes the first elements of a dimension, one after the other."""
    said = arguments(sliced, "self", "dim", "start", "end", "step") if calls(sliced, aten.slice.Tensor) else None
    return said is not None and said[2] in (0, None) and said[4] == 1


def is_4d(arg: object) -> bool:
    """True for a node that produces a tensor of four dimensions."""
    return isinstance(arg, Node) and is_tensor(arg) and value(arg).ndim == 4


def without_copies(node: Node) -> Node:
    """Up through what changes neither elements nor shape."""
    while (calls(node, *COPIES, *ALIASES) or is_noop(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def show(arg: object) -> str:
    """An argument of a call, for a sentence."""
    return arg.name if isinstance(arg, Node) else repr(arg)
