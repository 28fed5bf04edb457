"""Inductor's private surface: the post-grad hook, the config, the caches.  Only this module imports `torch._inductor`,
with `tracing` (functions as post-grad graphs) and `testing` (which captures graphs).

Drift that is handled here, and nowhere else: the hook takes one pass up to torch 2.12 and a list from 2.13; a pass in
`options=` replaces one that was set globally without a word, so it is chained; a compiled graph that comes from the
cache does not run the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch.fx import Graph

HOOK = "post_grad_custom_post_pass"
MINIMUM_TORCH = (2, 11)

_COUNTER = "fusion_passes:"


def check_torch() -> None:
    """Raise RuntimeError with what to do if this torch is too old."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        raise RuntimeError(
            f"fusion_passes needs torch {wanted} or newer, this is {torch.__version__}: pip install 'torch>={wanted}'"
        )


class PassChain(CustomGraphPass):
    """Several passes in a row, for a torch whose hook takes one.  Remove with support for torch 2.12."""

    def __init__(self, passes: Iterable[Callable[[Graph], None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The uuids of all passes; None (never cache) if one of them has none, as Inductor does for a bare function."""
        uuids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return uuids if all(uuids) else None


def passes_in(hook: object) -> list[Callable[[Graph], None]]:
    """The passes of a hook's value, whatever its form: None, a pass, a list, a chain of ours."""
    if hook is None:
        return []
    if isinstance(hook, PassChain):
        return list(hook.passes)
    if isinstance(hook, (list, tuple)):
        return list(hook)
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

    Our passes that are there already (a global switch) give way: the explicit request wins.
    """
    merged: dict[str, Any] = {}
    if mode and mode != "default":
        merged.update(torch._inductor.list_mode_options(mode, dynamic))
    merged.update({name.replace("-", "_"): setting for name, setting in (options or {}).items()})
    present = passes_in(merged.get(HOOK, getattr(torch._inductor.config, HOOK)))
    merged[HOOK] = hook_value([p for p in present if not isinstance(p, type(manager))] + [manager])
    return merged


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


def patched(manager: CustomGraphPass) -> AbstractContextManager[None]:
    """A context in which every compilation runs `manager` behind whatever pass is set globally."""
    return cast(
        "AbstractContextManager[None]",
        torch._inductor.config.patch({HOOK: chained_options(manager, None, None, None)[HOOK]}),
    )


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


def mark_compiled(graph_id: str) -> None:
    """Tie `graph_id` to the code being compiled: Inductor stores its counters' changes with the code in its cache and
    adds them again when that code is loaded, which is how a graph from the cache tells its id (`loaded_graphs`)."""
    torch._dynamo.utils.counters["inductor"][_COUNTER + graph_id] += 1


def marked_graphs() -> dict[str, int]:
    """Graph ids whose code was compiled or loaded in this process, with how often."""
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
