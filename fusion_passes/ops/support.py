"""What can be known about a machine: the questions that the limits of a kernel are made of; and how an op gets along
without its kernel.

A call that means something always runs.  Where no kernel takes it, it runs in another way, and the log says so once.
"""

import functools
import importlib
import importlib.metadata
import logging
import re
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Call = TypeVar("Call")
Result = TypeVar("Result")
Capability = tuple[int, int]


def device_capability(device: torch.device) -> Capability | None:
    """Compute capability of an NVIDIA GPU; None for anything else."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def device_name(device: torch.device) -> str | None:
    """Name of a GPU, as its driver gives it; None for anything else, and where there is none to ask."""
    return torch.cuda.get_device_name(device) if device_capability(device) is not None else None


def on_its_device(
    run: Callable[Concatenate[Tensor, Arguments], Result],
) -> Callable[Concatenate[Tensor, Arguments], Result]:
    """`run` with the device of its first argument as the current one, where Triton launches its kernels."""

    @functools.wraps(run)
    def guarded(x: Tensor, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.cuda.device(x.device):
            return run(x, *args, **kwargs)

    return guarded  # type: ignore[return-value]  # mypy: a wrapper of it is not a callable like it


def unpacked(arguments: Callable[..., Call], run: Callable[[Call], Result]) -> Callable[..., Result]:
    """An implementation of an op, which torch calls with all arguments, from `run`, which takes one value of them."""
    return lambda *tensors, **options: run(arguments(*tensors, **options))


@functools.cache
def _capability(index: int) -> Capability:
    return torch.cuda.get_device_capability(index)


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Installed version of Triton, read without importing it."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            major, minor = importlib.metadata.version(name).split(".")[:2]
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


@functools.cache
def kernel_module(name: str) -> ModuleType | str:
    """A module of kernels, or the sentence why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:  # AttributeError: an experimental API that has moved
        return f"{name} cannot be imported: {error}"


_failed: dict[tuple[Hashable, ...], str] = {}


def launched(variant: Callable[[], tuple[Hashable, ...]], launch: Callable[[], object]) -> str | None:
    """Launch kernels: None where they run, or the sentence why Triton cannot compile or load them for this GPU.

    variant: what a kernel is compiled for, and its name; asked only where one has failed, which is remembered.
    Any error that is not Triton's is raised.
    """
    if _failed and (why := _failed.get(variant())) is not None:
        return why
    try:
        launch()
    except Exception as error:
        if all(kind.__module__.partition(".")[0] != "triton" for kind in type(error).__mro__):
            raise
        why = f"Triton {type(error).__name__}: {error}".splitlines()[0]
        _failed[variant()] = why
        return why
    return None


_told: set[tuple[str, str, str]] = set()


def say_slow(op: str, way: str, why: str, advice: str) -> None:
    """Warn that an op runs in another way than by its best kernel: once for each reason, whatever its numbers."""
    key = op, way, re.sub(r"\d+", "", why)
    if key not in _told:
        _told.add(key)
        logging.getLogger(f"fusion_passes.ops.{op}").warning("%s %s, which is slow: %s; %s", op, way, why, advice)
