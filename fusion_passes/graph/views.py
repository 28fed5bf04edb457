"""Putting views behind a fused op: the ones that stood between the ops that it replaces, without needless copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Node

from fusion_passes.graph.match import Call
from fusion_passes.graph.read import COPIES, RESHAPES, calls, is_noop, same_layout, value


def replay(views: Iterable[Node], node: Node, call: Call) -> Node:
    """Apply `views` to `node`; a copy into the layout that it already has is left out."""
    for view in views:
        if _is_needed(view, node.meta["val"]):
            node = call(view.target, node, *view.args[1:], **view.kwargs)
    return node


def best_layout(
    layouts: Iterable[str], empty: Callable[[Tensor, str], Tensor], views: Sequence[Node], source: Node
) -> str:
    """The layout of a fused op's output from which `views` reach the strides of the last of them with fewest copies.

    `empty(like, layout)`: such an output, without values.  `source`: the node that the views start from.
    """
    costs: dict[str, tuple[bool, int]] = {}
    for layout in layouts:
        costs[layout] = cost(empty, layout, views, source)
        if costs[layout] == (False, 0):
            break
    return min(costs, key=costs.__getitem__)


def cost(empty: Callable[[Tensor, str], Tensor], layout: str, views: Sequence[Node], source: Node) -> tuple[bool, int]:
    """What `views` make of such an output, see `best_layout`: (does not reach the strides, copies on the way)."""
    x = value(source)
    mode = detect_fake_mode(x)
    if mode is None:
        raise ValueError(f"{source.name} has no fake tensor")
    copies = 0
    with mode:
        x = empty(x, layout)
        for view in views:
            if not _is_needed(view, x):
                continue
            y = applied(view, x)
            copies += calls(view, *COPIES) or (calls(view, *RESHAPES) and not _is_alias(x, y))
            x = y
    return not same_layout(x, value(views[-1] if views else source)), copies


def applied(view: Node, x: Any) -> Any:
    """A view of the fake tensor `x` (or, of a split, its tuple), as `view` is one of its own input."""
    args: tuple[Any, ...] = torch.fx.node.map_arg(view.args[1:], lambda n: n.meta["val"])
    return view.target(x, *args, **torch.fx.node.map_arg(view.kwargs, lambda n: n.meta["val"]))  # type: ignore[operator]


def _is_needed(view: Node, x: Any) -> bool:
    """False for a view that changes nothing: a no-op, or a copy into the layout that `x` already has."""
    return not is_noop(view) and not (calls(view, *COPIES) and same_layout(x, value(view)))


def _is_alias(x: Tensor, y: Tensor) -> bool:
    """True where a reshape gave a view, not a copy."""
    return y._base is not None and (y._base is x or y._base is x._base)
