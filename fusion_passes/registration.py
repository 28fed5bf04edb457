"""Switching the passes on: for one `torch.compile`, for a block of code, or for the whole process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, overload

import torch

from fusion_passes import inductor
from fusion_passes.config import PassConfig
from fusion_passes.manager import PostGradPassManager
from fusion_passes.report import Report

Model = TypeVar("Model", bound=Callable[..., Any])


def inductor_options(
    config: PassConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that register the passes.

    Args:
        config: what to fuse; None reads the environment (`PassConfig.from_env`).
        options: your own Inductor options.  A `post_grad_custom_post_pass` in them, or one that is set globally, runs
            first and is kept.
        mode: what you would have given to `torch.compile(mode=)`, which does not accept `options` beside it.
        dynamic: what you give to `torch.compile(dynamic=)`; some modes depend on it.
        report: filled at each compilation with what was fused, what was not, and why.

    Raises RuntimeError if torch is too old, or the mode is unknown.
    """
    manager = PostGradPassManager(PassConfig.from_env() if config is None else config, report)
    return inductor.chained_options(manager, options, mode, dynamic)


@overload
def compile(  # noqa: A001
    model: Model,
    config: PassConfig | None = None,
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
    config: PassConfig | None = None,
    *,
    report: Report | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    **torch_compile_kwargs: Any,
) -> Callable[[Model], Model]: ...


def compile(  # noqa: A001
    model: Any = None,
    config: PassConfig | None = None,
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
    config = PassConfig.from_env() if config is None else config
    report = Report() if report is None else report
    merged = inductor_options(config, options=options, mode=mode, dynamic=dynamic, report=report)
    compiled = torch.compile(model, options=merged, dynamic=dynamic, **torch_compile_kwargs)
    return _checked(compiled, config, report)


@contextmanager
def enabled(config: PassConfig | None = None, *, report: Report | None = None) -> Iterator[Report]:
    """Run the passes in every compilation of the block, also where code that you cannot reach calls `torch.compile`.

    What counts is when a graph is compiled (the first call), not when `torch.compile` is called.  A pass that is set
    globally runs first; at the end everything is as it was.  Yields the report.  Raises RequiredFusionError at the end
    for a required fusion that was applied nowhere.
    """
    config = PassConfig.from_env() if config is None else config
    manager = PostGradPassManager(config, report)
    with inductor.patched(manager):
        yield manager.report
    _require_all(config, manager.report)


_global = ExitStack()


def enable(config: PassConfig | None = None, *, report: Report | None = None) -> Report:
    """Run the passes in every compilation of this process from now on, until `disable`.  Returns the report.

    Called again, the new settings take the place of the old.  Required fusions are judged graph by graph; call
    `report.require(name)` for the whole.
    """
    disable()
    manager = PostGradPassManager(PassConfig.from_env() if config is None else config, report)
    _global.enter_context(inductor.patched(manager))
    return manager.report


def disable() -> None:
    """Undo `enable`: the hook is what it was before."""
    _global.close()


def _require_all(config: PassConfig, report: Report) -> None:
    for name in config.required:
        report.require(name)


def _checked(compiled: Any, config: PassConfig, report: Report) -> Any:
    """`compiled`, judging required fusions after its first call."""
    if not config.required:
        return compiled
    if isinstance(compiled, torch.nn.Module):

        def judge(*_: Any) -> None:
            handle.remove()
            _require_all(config, report)

        handle = compiled.register_forward_hook(judge)
        return compiled

    pending = [True]

    @functools.wraps(compiled)
    def first_call_is_judged(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        if pending:
            pending.clear()
            _require_all(config, report)
        return result

    return first_call_is_judged
