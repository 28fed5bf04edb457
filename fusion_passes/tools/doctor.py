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
from fusion_passes.ops import support
from fusion_passes.ops.declare import OPS
from fusion_passes.ops.kernel import Kernel

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


INDUCTORS = Kernel(
    name="Inductor's kernel of what comes before",
    module="triton",
    takes={"for": "what the fusion leaves to Inductor, where its input is not an input of the graph"},
)
"""Of a fusion without an op."""


def kernels_of(rule: Rule[Any]) -> tuple[Kernel, ...]:
    """The kernels behind a fusion: of the ops that it puts into a graph, each once."""
    return tuple(dict.fromkeys(kernel for op in rule.ops for kernel in OPS[op])) or (INDUCTORS,)


def kernels(rule: Rule[Any]) -> list[tuple[str, str, str]]:
    """For each kernel behind a fusion: its name, what it takes, and why it is not usable on this machine or ""."""
    return [(kernel.name, _limits(kernel), why_unusable(kernel)) for kernel in kernels_of(rule)]


def _limits(kernel: Kernel) -> str:
    limits = kernel.limits
    return "; ".join([limits.pop("GPU"), *(f"{about} {limit}" for about, limit in limits.items())])


def why_unusable(kernel: Kernel) -> str:
    """Asked of the card and of Triton."""
    cuda = torch.device("cuda")
    if support.device_capability(cuda) is None:
        return "not usable: no NVIDIA GPU is visible"
    why = kernel.why_not_on(cuda) or _why_no_module(kernel.module)
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
