"""What can be known about a machine and a symbolic size: the questions that the limits of a kernel are made of."""

import functools
import importlib.metadata

import torch
from torch import SymBool

Capability = tuple[int, int]


def known(condition: bool | SymBool) -> bool:
    """Whether the condition holds for all values of the symbols in it. Adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy: only when it is needed

    return statically_known_true(condition)


def device_capability(device: torch.device) -> Capability | None:
    """Compute capability of an NVIDIA GPU; None for anything else."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


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
