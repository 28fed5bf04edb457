"""The passes in Inductor's global hook: for a block of code, or for the process.

Anybody may set the hook, and from torch 2.13 each thread has one of its own.  So it is put right whenever Dynamo begins
to compile something: what others have put there stays and runs first, ours comes last, and what was switched off goes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakSet

from fusion_passes.compiler import compiled, inductor
from fusion_passes.compiler.manager import PostGradPassManager

log = logging.getLogger("fusion_passes")

_process: PostGradPassManager | None = None
_blocks: ContextVar[tuple[PostGradPassManager | None, ...]] = ContextVar("_blocks", default=())
_switched: WeakSet[PostGradPassManager] = WeakSet()
"""All that were ever switched on: where one of them is found in the hook and is not on, somebody has put it back."""
_replaced: ContextVar[tuple[object, object]] = ContextVar("_replaced", default=(None, None))
"""What was put into the hook, and what was there before."""
_nodes_before: int = 0


def switch_process(manager: PostGradPassManager | None) -> None:
    """Switch the process to `manager`, or None: off."""
    global _process
    _process = manager
    _put_right()


def enter_block(manager: PostGradPassManager) -> None:
    """Switch this thread to `manager`, before the process's, until `leave_block`."""
    _blocks.set((*_blocks.get(), manager))
    _put_right()


def leave_block(manager: PostGradPassManager) -> None:
    """Undo `enter_block`."""
    _blocks.set(tuple(other for other in _blocks.get() if other is not manager))
    _put_right()


@contextmanager
def switched_off() -> Iterator[None]:
    """A block in which no manager is on in this thread."""
    before = _blocks.get()
    _blocks.set((*before, None))
    _put_right()
    try:
        yield
    finally:
        _blocks.set(before)
        _put_right()


def _current() -> PostGradPassManager | None:
    blocks = _blocks.get()
    return blocks[-1] if blocks else _process


def _put_right() -> None:
    """Let the hook hold what others put there and, last, the manager that is on."""
    manager = _current()
    found = inductor.hook()
    passes = inductor.passes_in(found)
    if manager is None:
        others = [p for p in passes if not (isinstance(p, PostGradPassManager) and p in _switched)]
        if len(others) < len(passes):
            put, before = _replaced.get()
            ours_alone = found is put and inductor.passes_in(before) == others
            inductor.set_hook(before if ours_alone else inductor.hook_value(others) if others else None)
        return
    _switched.add(manager)
    wanted = [p for p in passes if not isinstance(p, PostGradPassManager)]
    wanted.append(manager)
    if passes != wanted:
        put, before = _replaced.get()
        value = inductor.hook_value(wanted)
        _replaced.set((value, before if found is put and put is not None else found))
        inductor.set_hook(value)


def _begin() -> None:
    global _nodes_before
    _put_right()
    inductor.remember_hook(inductor.passes_in(inductor.hook()))
    _nodes_before = inductor.nodes_compiled()


def _end() -> None:
    inductor.remember_hook(None)
    if _current() is not None and not compiled.asked() and inductor.nodes_compiled() > _nodes_before:
        log.warning(
            "fusion_passes: code was compiled where the passes are switched on, and they did not run: its own options "
            "set %s, which replaces ours, or switch such passes off. Compile it with fusion_passes.compile(model, "
            "options=...), or torch.compile(model, options=fusion_passes.inductor_options(options=...)): both run then",
            inductor.HOOK,
        )


inductor.on_compilation(start=_begin, end=_end)
