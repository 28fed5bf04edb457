"""Switching the passes on: for one `torch.compile`, for a block of code, or for the whole process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, overload

import torch

from fusion_passes import inductor
from fusion_passes.config import PassConfig
from fusion_passes.manager import PostGradPassManager
from fusion_passes.report import Report

log = logging.getLogger("fusion_passes")

Model = TypeVar("Model", bound=Callable[..., Any])
Config = PassConfig | Mapping[str, Any] | None
"""Settings: a `PassConfig`, a plain dict of them, or None for the environment (`PassConfig.from_env`)."""


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
        options: your own Inductor options.  A `post_grad_custom_post_pass` in them, or one that is set globally, runs
            first and is kept.
        mode: what you would have given to `torch.compile(mode=)`, which does not accept `options` beside it.
        dynamic: what you give to `torch.compile(dynamic=)`; some modes depend on it.
        report: filled at each compilation with what was fused, what was not, and why.

    A required fusion is judged graph by graph here: the first that has places for it and takes none raises
    RequiredFusionError, wrapped by torch.  `compile` and `enabled` judge the whole model instead.

    Raises RuntimeError if torch is too old, or the mode is unknown.
    """
    manager = PostGradPassManager(_settings(config), report)
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

    A fusion that `config` requires and that was applied nowhere raises RequiredFusionError at the first call.  For the
    other arguments see `inductor_options`.
    """
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
    settings = _settings(config)
    report = Report() if report is None else report
    manager = PostGradPassManager(settings, report, judge=False)
    merged = inductor.chained_options(manager, options, mode, dynamic)
    compiled = torch.compile(model, options=merged, dynamic=dynamic, **torch_compile_kwargs)
    return _judged(compiled, settings, report)


@contextmanager
def enabled(config: Config = None, *, report: Report | None = None) -> Iterator[Report]:
    """Run the passes in every compilation of the block, also where code that you cannot reach calls `torch.compile`.

    What counts is when a graph is compiled (the first call), not when `torch.compile` is called.  A pass that is set
    globally runs first; at the end everything is as it was.  Yields the report.  Raises RequiredFusionError at the end
    for a required fusion that was applied nowhere.
    """
    settings = _settings(config)
    manager = PostGradPassManager(settings, report, judge=False)
    with inductor.patched(manager):
        yield manager.report
    _judge(settings, manager.report)


_global = ExitStack()


def enable(config: Config = None, *, report: Report | None = None) -> Report:
    """Run the passes in every compilation of this process from now on, until `disable`.  Returns the report.

    Called again, the new settings take the place of the old.  Required fusions are judged graph by graph; call
    `report.require(name)` for the whole.
    """
    disable()
    manager = PostGradPassManager(_settings(config), report)
    _global.enter_context(inductor.patched(manager))
    return manager.report


def disable() -> None:
    """Undo `enable`: the hook is what it was before."""
    _global.close()


def _settings(config: Config) -> PassConfig:
    if config is None:
        return PassConfig.from_env()
    return config if isinstance(config, PassConfig) else PassConfig.from_dict(config)


def _judge(config: PassConfig, report: Report) -> None:
    """Of what was asked for by name and applied nowhere: raise for what is required, warn of the rest."""
    for name in config.asked_for:
        if name in config.required:
            report.require(name)
        elif report.graphs and report.count(rule=name) == 0:
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
