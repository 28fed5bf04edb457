"""What can be known about a machine: the questions that the limits of a kernel are made of."""

import functools
import importlib.metadata
from collections.abc import Callable
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


def taking(arguments: Callable[..., Call], run: Callable[[Call], Result]) -> Callable[..., Result]:
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
