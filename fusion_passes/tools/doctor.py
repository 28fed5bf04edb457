"""What this machine can do: the facts that decide whether the passes run and which fusions are usable."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_passes.compiler import inductor
from fusion_passes.compiler.config import ENV_PREFIX, PassConfig
from fusion_passes.fusions.rule import Rule
from fusion_passes.ops.attention_quant import OUTPUT_DTYPES, AttentionQuantArguments
from fusion_passes.ops.kernel import NEWEST
from fusion_passes.ops.kv_cache_write import KERNEL_DTYPES as WRITE_DTYPES
from fusion_passes.ops.paged_attention import KERNEL_DTYPES as PAGED_DTYPES
from fusion_passes.ops.paged_attention import KERNEL_HEAD_DIMS as PAGED_HEAD_DIMS
from fusion_passes.ops.support import Capability, device_capability, triton_version
from fusion_passes.quant import dtype_name

PACKAGES = ("triton", "transformers", "torchao")
COMPILERS = ("g++", "clang++", "c++")
DISABLING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


@dataclass(frozen=True)
class Finding:
    """One fact.  problem: what does not work because of it, or ""; todo: what to do about it, or "" for a mere note."""

    topic: str
    found: str
    problem: str = ""
    todo: str = ""


def examine() -> list[Finding]:
    """All facts, in the order in which one thing depends on another."""
    return [
        Finding("python", f"{platform.python_version()}, {sys.executable}"),
        *_torch(),
        *_packages(),
        *_devices(),
        *_compiler(),
        *_caches(),
        *_environment(),
    ]


def kernels(rule: Rule[Any]) -> list[tuple[str, str, str]]:
    """For each kernel behind a fusion: its name, what it takes, and why it is not usable on this machine or ""."""
    try:
        op = importlib.import_module(f"fusion_passes.ops.{rule.name}")
    except ModuleNotFoundError:
        op = None
    rows = [(kernel.name, _limits(kernel), _why_unusable(kernel)) for kernel in getattr(op, "KERNELS", ())]
    return rows + [(k.name, _needs(k), _why_unusable_here(k)) for k in OTHER_KERNELS.get(rule.name, ())]


@dataclass(frozen=True)
class _Kernel:
    """A kernel whose op chooses by itself.

    takes: tensors, in words. module: None for code that Inductor makes. first, last: compute capabilities that are
    supported. triton: the first version that it runs with; None: any."""

    name: str
    takes: str
    module: str | None
    first: Capability = (8, 9)  # the first with FP8 conversions
    last: Capability = NEWEST
    triton: tuple[int, int] | None = None


_OVER_A_CACHE = "/".join(map(dtype_name, PAGED_DTYPES)) + ", head size " + ", ".join(map(str, PAGED_HEAD_DIMS))
_PAGED = (
    _Kernel(
        "the paged decode kernel",
        f"few new tokens of each sequence; {_OVER_A_CACHE}",
        "fusion_passes.kernels.paged_decode",
    ),
    _Kernel(
        "the Hopper paged prefill kernel",
        "many new tokens; what it does not take the portable one does",
        "fusion_passes.kernels.paged_prefill_sm90",
        (9, 0),
        (9, 0),
        (3, 6),
    ),
    _Kernel(
        "the portable paged prefill kernel",
        f"many new tokens; {_OVER_A_CACHE}",
        "fusion_passes.kernels.paged_prefill",
    ),
)
OTHER_KERNELS: dict[str, tuple[_Kernel, ...]] = {
    "attention_quant": _PAGED,
    "query_quant": (
        _Kernel("Inductor's kernel of what comes before", "a query that is not an input of the graph", None),
    ),
    "rope_quant_kv_write": (
        _Kernel(
            "the RoPE and cache kernel",
            "/".join(map(dtype_name, WRITE_DTYPES)),
            "fusion_passes.kernels.rope_quant_kv_write",
        ),
    ),
}
"""By the name of the fusion, beside those in its op's `KERNELS`."""


def _needs(kernel: _Kernel) -> str:
    triton = None if kernel.triton is None else (kernel.triton, None)
    return f"{_span(kernel.first, kernel.last, triton)}; {kernel.takes}"


def _span(first: Capability, last: Capability, triton: tuple[tuple[int, int], tuple[int, int] | None] | None) -> str:
    card = f"compute capability {first[0]}.{first[1]}" + ("" if first == last else " or later")
    if triton is None:
        return f"{card}, Triton"
    least, below = triton
    until = " or later" if below is None else f" to below {below[0]}.{below[1]}"
    return f"{card}, Triton {least[0]}.{least[1]}{until}"


def _limits(kernel: Any) -> str:
    dtypes = "/".join(map(dtype_name, kernel.dtypes))
    parts = [
        _span(kernel.capability[0], kernel.capability[1], kernel.triton),
        f"{dtypes}, head size {', '.join(map(str, kernel.head_dims))}",
    ]
    if not kernel.masks:
        parts.append("no mask tensor")
    if not kernel.cross_lengths:
        parts.append("as many queries as keys")
    return "; ".join(parts)


def _why_unusable(kernel: Any) -> str:
    """Asked with the easiest inputs that the kernel names."""
    if not torch.cuda.is_available():
        return "not usable: no NVIDIA GPU is visible"
    query = torch.empty((1, 1, 1, kernel.head_dims[0]), dtype=kernel.dtypes[0], device="cuda")
    why = kernel.unsupported(AttentionQuantArguments(query, query, query, dtype=OUTPUT_DTYPES[0]))
    why = why or _why_no_module(kernel.module)
    return f"not usable: {why}" if why else ""


def _why_unusable_here(kernel: _Kernel) -> str:
    """Asked of the card and of Triton."""
    capability, triton = device_capability(torch.device("cuda")), triton_version()
    if capability is None:
        return "not usable: no NVIDIA GPU is visible"
    if not kernel.first <= capability <= kernel.last:
        why: str | None = f"this GPU has compute capability {capability[0]}.{capability[1]}"
    elif triton is None or triton < (kernel.triton or triton):
        why = f"Triton {triton[0]}.{triton[1]} is installed" if triton else "Triton is not installed"
    else:
        why = None if kernel.module is None else _why_no_module(kernel.module)
    return f"not usable: {why}" if why else ""


def _why_no_module(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        return f"{name} cannot be imported: {error}"
    return None


def _torch() -> Iterator[Finding]:
    built_for = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    try:
        inductor.check_torch()
    except RuntimeError as error:
        wanted = ".".join(map(str, inductor.MINIMUM_TORCH))
        yield Finding("torch", torch.__version__, str(error), f"pip install 'torch>={wanted}'")
        return
    yield Finding("torch", f"{torch.__version__}, built {built_for}")
    several = isinstance(inductor.hook_value([_nothing, _nothing]), list)
    yield Finding(
        "hook", f"{inductor.HOOK} takes {'a list of passes' if several else 'a single pass: ours is chained'}"
    )
    for variable in DISABLING:
        if os.environ.get(variable, "0") not in ("", "0"):
            yield Finding(
                variable,
                os.environ[variable],
                "torch.compile does nothing, so neither do the passes",
                f"unset {variable}",
            )


def _nothing(graph: torch.fx.Graph) -> None:
    """A pass."""


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if name == "triton" and found == "not installed" and torch.cuda.is_available():
            yield Finding(name, found, "Inductor and the kernels need it on a GPU", "pip install 'triton>=3.6'")
        else:
            yield Finding(name, found)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            "device",
            "CPU only",
            "the fused ops run as plain torch here, and no fusion is faster: by default none is applied",
        )
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        problem = "" if (major, minor) >= (8, 9) else "has no FP8 conversions (8.9 is the first): no kernel runs on it"
        yield Finding(f"cuda:{index}", found, problem)


def _compiler() -> Iterator[Finding]:
    named = os.environ.get("CXX")
    found = next((path for name in ([named] if named else COMPILERS) if (path := shutil.which(name))), None)
    if found:
        yield Finding("C++ compiler", found)
    else:
        yield Finding(
            "C++ compiler",
            f"CXX={named}, which is not there" if named else "none",
            "torch.compile needs one: on the CPU for every kernel, on a GPU where a graph has CPU parts",
            "install g++ (apt-get install g++), or set CXX to a C++ compiler",
        )


def _caches() -> Iterator[Finding]:
    found = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in inductor.cache_settings().items())
    try:
        directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor.cache_directory()
        found += f"; {directory}"
        existing = next(folder for folder in (Path(directory), *Path(directory).parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        problem = f"the cache directory cannot be written to: {error}"
        yield Finding("caches", found, problem, "set TORCHINDUCTOR_CACHE_DIR to a directory of yours")
    else:
        yield Finding("caches", found)


def _environment() -> Iterator[Finding]:
    given = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
    told = ", ".join(f"{name}={value}" for name, value in sorted(given.items())) or f"no {ENV_PREFIX}* is set"
    try:
        PassConfig.from_env()
    except ValueError as error:
        yield Finding("environment", told, str(error), "correct or unset it")
    else:
        yield Finding("environment", told)
