"""Inductor's private surface: the post-grad hook, the config, the caches.  Only this module imports `torch._inductor`,
with `tracing` (functions as post-grad graphs) and `testing` (which captures graphs).

Drift that is handled here, and nowhere else: the hook takes one pass up to torch 2.12 and a list from 2.13; passes that
are told whether the graph is one for inference exist from 2.12; a pass in `options=` replaces one that was set globally
without a word, so it is chained; a compiled graph that comes from the cache does not run the pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch
from torch._dynamo.callback import callback_handler
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch.fx import Graph

log = logging.getLogger("fusion_passes")

HOOK = "post_grad_custom_post_pass"
MINIMUM_TORCH = (2, 11)

_COUNTER = "fusion_passes:"

_InferenceAware: type[CustomGraphPass] | None = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
"""Passes that are called with `is_inference` too; from torch 2.12."""

_outside: ContextVar[tuple[Callable[[Graph], None], ...] | None] = ContextVar("_outside", default=None)
"""The passes in the hook when Dynamo began what is being compiled, before options took its place; None outside."""


def check_torch() -> None:
    """Raise RuntimeError with what to do if this torch is too old."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        raise RuntimeError(
            f"fusion_passes needs torch {wanted} or newer, this is {torch.__version__}: pip install 'torch>={wanted}'"
        )


class PassChain(_InferenceAware or CustomGraphPass):  # type: ignore[misc]
    """Several passes in a row as one pass, each called as torch would call it alone."""

    def __init__(self, passes: Iterable[Callable[[Graph], None]]) -> None:
        self._passes = tuple(passes)

    @property
    def passes(self) -> tuple[Callable[[Graph], None], ...]:
        """The passes, in the order in which they run."""
        return self._passes

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        """is_inference: as torch says from 2.12 on; before, no pass asks for it."""
        for graph_pass in self.passes:
            if _InferenceAware is not None and isinstance(graph_pass, _InferenceAware):
                cast("Callable[[Graph, bool], None]", graph_pass)(graph, is_inference)
            else:
                graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The uuids of all passes; None (never cache) if one of them has none, as Inductor does for a bare function."""
        uuids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return uuids if all(uuids) else None


class Following(PassChain):
    """Our pass, for `options`, behind the passes that are set globally when a graph is compiled.

    A pass in options replaces the global ones, so these are read before (`remember_hook`).  Where nothing is traced by
    Dynamo, as in `torch._inductor.aot_compile`, they are those that were set when the options were made.
    """

    def __init__(self, manager: CustomGraphPass) -> None:
        self.manager = manager
        self._then = tuple(passes_in(hook()))

    @property
    def passes(self) -> tuple[Callable[[Graph], None], ...]:
        """The global passes, without others of our kind: the explicit request wins; and our pass."""
        found = _outside.get()
        others = self._then if found is None else found
        return (*(p for p in others if not isinstance(p, type(self.manager))), self.manager)


def hook() -> object:
    """What is in the hook of this thread now."""
    return getattr(torch._inductor.config, HOOK)


def set_hook(value: object) -> None:
    """Put `value` into the hook of this thread (of all threads up to torch 2.12)."""
    setattr(torch._inductor.config, HOOK, value)


def remember_hook(passes: Iterable[Callable[[Graph], None]] | None) -> None:
    """The passes that are set globally while Dynamo compiles something; None when it is done."""
    _outside.set(None if passes is None else tuple(passes))


def hook_runs() -> bool:
    """Whether the compilation that is running has not switched the hook off (`use_post_grad_passes`,
    `disabled_passes`)."""
    config = torch._inductor.config
    return config.use_post_grad_passes and HOOK.upper() not in config.disabled_passes.upper()


def passes_in(hook: object) -> list[Callable[[Graph], None]]:
    """The passes of a hook's value, whatever its form: None, a pass, a list, a chain of ours."""
    if hook is None:
        return []
    if isinstance(hook, PassChain):
        return list(hook.passes)
    if isinstance(hook, (list, tuple)):
        return [graph_pass for part in hook for graph_pass in passes_in(part)]
    return [cast("Callable[[Graph], None]", hook)]


def hook_value(passes: list[Callable[[Graph], None]]) -> object:
    """`passes` in the form that this torch's hook takes."""
    if len(passes) == 1:
        return passes[0]
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return passes
    return PassChain(passes)


def chained_options(
    manager: CustomGraphPass, options: Mapping[str, Any] | None, mode: str | None, dynamic: bool | None
) -> dict[str, Any]:
    """The user's `options`, `mode`'s settings and our pass behind the user's own pass, as one `options` dict.

    Our passes that are there already (a global switch) give way: the explicit request wins.  Raises TypeError for
    options that are no dict of settings, or whose pass is none.
    """
    if not isinstance(options, (Mapping, type(None))) or not all(isinstance(name, str) for name in options or ()):
        raise TypeError(f'options={options!r}: must be a dict of Inductor\'s options, such as {{"max_autotune": True}}')
    merged: dict[str, Any] = {}
    if mode and mode != "default":
        merged.update(torch._inductor.list_mode_options(mode, dynamic))
    merged.update({name.replace("-", "_"): setting for name, setting in (options or {}).items()})
    given = merged.get(HOOK)
    if HOOK not in merged or isinstance(given, Following):
        return {**merged, HOOK: Following(manager)}
    own = [graph_pass for graph_pass in passes_in(given) if not isinstance(graph_pass, type(manager))]
    for graph_pass in own:
        if not callable(graph_pass):
            raise TypeError(
                f"options: {HOOK} is {graph_pass!r}: must be a pass, which takes the graph, or a list of them"
            )
    return {**merged, HOOK: hook_value([*own, manager])}


def passes_of_compilation() -> list[Callable[[Graph], None]]:
    """The passes that what Dynamo is tracing will go through; those that are set globally where it traces nothing.

    Dynamo keeps compiled code apart by its backend, options and all, so what is traced may depend on them.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    options: Mapping[str, Any] = {}
    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # nothing is being traced
        backend = None
    while backend is not None:
        options = getattr(backend, "config", options)
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return passes_in(options.get(HOOK, getattr(torch._inductor.config, HOOK)))


def without(options: Mapping[str, Any], kind: type[CustomGraphPass]) -> dict[str, Any]:
    """`options` with all but the passes of one kind: what they are compared with."""
    kept = [p for p in passes_in(options.get(HOOK)) if not isinstance(p, kind)]
    return {**options, HOOK: hook_value(kept) if kept else None}


class _Callbacks(list[Callable[[Any], None]]):
    """A list of Dynamo's callbacks whose `clear`, called by `torch.compiler.reset`, leaves ours."""

    def __init__(self, others: Iterable[Callable[[Any], None]]) -> None:
        super().__init__(others)
        self.ours: list[Callable[[Any], None]] = []

    def clear(self) -> None:
        self[:] = self.ours


def on_compilation(*, start: Callable[[], None], end: Callable[[], None]) -> None:
    """From now on, call `start` before Dynamo compiles something, `end` after, in the thread that does; also where the
    code comes from a cache, so that no pass is run."""
    for name, callback in (("start_callbacks", start), ("end_callbacks", end)):
        callbacks = getattr(callback_handler, name)
        if not isinstance(callbacks, _Callbacks):
            callbacks = _Callbacks(callbacks)
            setattr(callback_handler, name, callbacks)
        callbacks.ours.append(_logged(callback))
        callbacks.append(callbacks.ours[-1])


def _logged(callback: Callable[[], None]) -> Callable[[Any], None]:
    """A callback that raises nothing: torch would count its compilations wrongly ever after."""

    def run(_: object) -> None:
        try:
            callback()
        except Exception:
            log.exception("fusion_passes failed where a compilation begins or ends; please report this")

    return run


def may_inline(target: object) -> bool:
    """False for a call that is sure to be a kernel of its own, which realises its inputs where it stands: an op that
    Inductor has no lowering for.  Anything else may be computed later, by what uses it."""
    from torch._inductor.lowering import fallbacks, lowerings

    if isinstance(target, torch._ops.HigherOrderOperator):
        return not target.name().startswith(("auto_functionalized", "triton_kernel_wrapper"))
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target in lowerings and target not in fallbacks


def reports_dir() -> Path | None:
    """Where reports are kept beside the compiled code; None where nothing is cached."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    config = torch._inductor.config
    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    return Path(cache_dir()) / "fusion_passes"


def mark_compiled(mark: str) -> None:
    """Tie `mark` to the code being compiled: Inductor stores its counters' changes with the code in its cache and adds
    them again when that code is loaded, wherever it comes from; so a graph from a cache brings its mark back."""
    torch._dynamo.utils.counters["inductor"][_COUNTER + mark] += 1


def marks() -> dict[str, int]:
    """The marks of the code that was compiled or loaded in this process, with how often."""
    counters = torch._dynamo.utils.counters["inductor"]
    return {name.removeprefix(_COUNTER): n for name, n in counters.items() if name.startswith(_COUNTER)}


@contextmanager
def uncached() -> Iterator[None]:
    """A context in which every graph is compiled, none taken from Inductor's or AOTAutograd's cache."""
    import torch._functorch.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def compile_counts() -> dict[str, int]:
    """How much was compiled in this process so far: graphs, graph breaks, Triton or C++ kernels, calls of other ops."""
    from torch._inductor import metrics

    counters = torch._dynamo.utils.counters
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "generated_kernels": metrics.generated_kernel_count,
        "external_calls": counters["inductor"]["extern_calls"],
    }


def nodes_compiled() -> int:
    """How many nodes Inductor has made code for in this process so far, or had made it when the code was cached."""
    from torch._inductor import metrics

    return metrics.ir_nodes_pre_fusion


def cache_directory() -> str:
    """Where Inductor keeps compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def cache_settings() -> dict[str, bool]:
    """The caches of compiled graphs, and whether they are on."""
    import torch._functorch.config

    off = torch._inductor.config.force_disable_caches
    return {
        "FX graph cache": torch._inductor.config.fx_graph_cache and not off,
        "AOTAutograd cache": torch._functorch.config.enable_autograd_cache and not off,
    }
