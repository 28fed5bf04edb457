"""Switching the passes on: for one `torch.compile`, for a block of code, or for the whole process."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, overload

import torch

from fusion_passes.compiler import inductor, switch
from fusion_passes.compiler.config import Config, PassConfig, as_config
from fusion_passes.compiler.manager import PostGradPassManager
from fusion_passes.compiler.report import Report

log = logging.getLogger("fusion_passes")

Model = TypeVar("Model", bound=Callable[..., Any])


def inductor_options(
    config: Config = None,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that register the passes.

    Args:
        config: what to fuse: a `PassConfig`, a dict of its settings, or None to read the environment.
        options: your own Inductor options.  A `post_grad_custom_post_pass` in them is kept and runs first; without one
            in them, so does whatever is set globally when a graph is compiled.
        mode: what you would have given to `torch.compile(mode=)`, which does not accept `options` beside it.
        dynamic: what you give to `torch.compile(dynamic=)`; some modes depend on it.
        report: filled at each compilation with what was fused, what was not, and why.

    A required fusion is judged graph by graph here: the first that has places for it and takes none raises
    RequiredFusionError, wrapped by torch; one that raised is not cached.  `compile` and `enabled` judge the whole model
    instead.

    Raises RuntimeError if torch is too old, or the mode is unknown; TypeError or ValueError for an argument that cannot
    be, saying what can.
    """
    manager = PostGradPassManager(as_config(config), report)
    return inductor.chained_options(manager, options, mode, dynamic)


@overload
def compile(  # noqa: A001
    model: Model,
    config: Config = None,
    *,
    report: Report | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    **torch_compile_kwargs: Any,
) -> Model: ...


@overload
def compile(  # noqa: A001
    model: None = None,
    config: Config = None,
    *,
    report: Report | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    **torch_compile_kwargs: Any,
) -> Callable[[Model], Model]: ...


def compile(  # noqa: A001
    model: Any = None,
    config: Config = None,
    *,
    report: Report | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    **torch_compile_kwargs: Any,
) -> Any:
    """`torch.compile` with the passes; takes everything that `torch.compile` takes, also `mode` beside `options`.

    A fusion that `config` requires and that was applied nowhere raises RequiredFusionError at the first call, also
    where nothing was compiled, and where the code came from a cache.  For the other arguments, and what else is raised,
    see `inductor_options`.
    """
    settings = as_config(config)
    for name in torch_compile_kwargs.keys() & {f.name for f in dataclasses.fields(PassConfig)}:
        value = torch_compile_kwargs[name]
        raise TypeError(f"{name} is a setting of the passes: write compile(model, {{{name!r}: {value!r}}})")
    if model is None:
        return functools.partial(
            compile,
            config=config,
            report=report,
            options=options,
            mode=mode,
            dynamic=dynamic,
            **torch_compile_kwargs,
        )
    if torch_compile_kwargs.get("backend", "inductor") != "inductor":
        raise ValueError(
            f"the passes run in Inductor, not in backend={torch_compile_kwargs['backend']!r}: leave it out"
        )
    if not callable(model):
        raise TypeError(f"compile({model!r}): must be a module or a function; settings go behind it, or into config=")
    manager = PostGradPassManager(settings, report, judge=False)
    merged = inductor.chained_options(manager, options, mode, dynamic)
    compiled = torch.compile(model, options=merged, dynamic=dynamic, **torch_compile_kwargs)
    return _judged(compiled, settings, manager.own)


def enabled(config: Config = None, *, report: Report | None = None) -> AbstractContextManager[Report]:
    """Run the passes in every compilation of the block, also where code that you cannot reach calls `torch.compile`.

    What counts is when a graph is compiled (the first call), not when `torch.compile` is called.  A pass that is set
    globally, before or in the block, is kept and runs first; at the end ours are gone, and the rest is as it was left.
    An inner block goes before an outer one, and before `enable`.  Code whose own options set a
    `post_grad_custom_post_pass` replaces ours, which is a warning.  Other threads are not concerned.

    Yields the report.  Raises RequiredFusionError at the end for a required fusion that was applied nowhere, also where
    nothing was compiled; TypeError or ValueError for an argument that cannot be.
    """
    return _enabled(PostGradPassManager(as_config(config), report, judge=False))


@contextmanager
def _enabled(manager: PostGradPassManager) -> Iterator[Report]:
    switch.enter_block(manager)
    try:
        yield manager.report
    finally:
        switch.leave_block(manager)
    _judge(manager.config, manager.own)


def enable(config: Config = None, *, report: Report | None = None) -> Report:
    """Run the passes in every compilation of this process from now on, in all threads, until `disable`.  Returns the
    report.

    Called again, the new settings take the place of the old.  A pass that is set globally, before or later, is kept and
    runs first.  Required fusions are judged graph by graph; call `report.require(name)` for the whole.
    """
    manager = PostGradPassManager(as_config(config), report)
    switch.switch_process(manager)
    return manager.report


def disable() -> None:
    """Undo `enable`: ours are gone from the hook, and the rest is as it was left."""
    switch.switch_process(None)


def _judge(config: PassConfig, report: Report) -> None:
    """Of what was asked for by name and applied nowhere: raise for what is required, warn of the rest."""
    for name in config.asked_for:
        if name in config.required:
            report.require(name)
        elif report.count(rule=name) == 0:
            log.warning("fusion_passes: %s was asked for and applied nowhere:\n  %s", name, report.why_not(name))


def _judged(compiled: Any, config: PassConfig, report: Report) -> Any:
    """`compiled`, judging what was asked for after each call, until nothing is left to say."""
    if not config.asked_for:
        return compiled
    if isinstance(compiled, torch.nn.Module):

        def judge(*_: Any) -> None:
            _judge(config, report)
            handle.remove()

        handle = compiled.register_forward_hook(judge)
        return compiled

    pending = [True]

    @functools.wraps(compiled)
    def judged(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        if pending:
            _judge(config, report)
            pending.clear()
        return result

    return judged
