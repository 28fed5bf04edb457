"""What a launch asks of a GPU, each once."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many streaming multiprocessors it has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
