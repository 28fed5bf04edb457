"""Questions about sizes that may be symbolic, asked so that no answer adds a guard to the user's graph."""

from __future__ import annotations

import torch


def known(condition: bool | torch.SymBool) -> bool:
    """True where `condition` holds for every value of the symbolic sizes in it; what is not provable is False."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # half a second: only where it is needed

    return statically_known_true(condition)


def same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """True where two sizes are provably equal: `known(a == b)`, but fast where two symbolic ones are written alike."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        ours, theirs = getattr(a.node, "expr", None), getattr(b.node, "expr", None)
        if ours is not None and ours == theirs and a.node.shape_env is b.node.shape_env:
            return True
    return known(a == b)


def fixed(size: int | torch.SymInt) -> int | None:
    """The number that a size is, also where it was a symbol once; None where it may be another."""
    if isinstance(size, int):
        return size
    number = size.node.maybe_as_int()
    return number if isinstance(number, int) else None


def hint(size: int | torch.SymInt) -> int | None:
    """The size seen while compiling, for judging profit only; None where a symbolic size has no known example."""
    if isinstance(size, int):
        return size
    seen = getattr(size.node, "hint", None)
    return seen if isinstance(seen, int) else None
