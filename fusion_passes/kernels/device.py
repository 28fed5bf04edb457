"""What a launch asks of a GPU, each once."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many streaming multiprocessors it has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it runs (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
