"""Runs of one model that can be compared: each sees the same inputs, buffers and clock."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusion_passes.compiler import inductor

SAMPLE_SECONDS = 0.01
"""A sample of the timing repeats the call until it lasts about that long."""
TIMING_SECONDS = 10.0
"""A slow model is timed with fewer samples, three at least."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call, the median of several samples taken in turn."""

    stock: float
    fused: float
    samples: int
    clock: str

    @property
    def speedup(self) -> float:
        """How many times as fast the fused model is."""
        return self.stock / self.fused


@dataclass(frozen=True)
class Compilation:
    """What one of the two compilations made, and how long its first call took."""

    seconds: float
    graphs: int
    graph_breaks: int
    generated_kernels: int
    external_calls: int


class Trial:
    """The model with its inputs: runs it so that no run sees what another one left behind."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.inputs = (args, kwargs)
        buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        given = [leaf for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, Tensor)]
        self.devices = sorted({t.device for t in (*parameters, *buffers, *given)}, key=str)
        self._state = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._state_is_known = False

    @property
    def on_gpu(self) -> bool:
        return any(device.type == "cuda" for device in self.devices)

    @property
    def device_name(self) -> str:
        names = [
            f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
            for device in self.devices
        ]
        return ", ".join(names) or "cpu"

    def copied_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy, for a model that writes to what it is given; the inputs themselves where they cannot be copied."""
        try:
            return copy.deepcopy(self.inputs)
        except Exception:
            return self.inputs

    def run(self, compiled: Callable[..., Any]) -> Any:
        """The output of one call, in memory of its own."""
        args, kwargs = self.copied_inputs()
        torch.compiler.cudagraph_mark_step_begin()
        output = compiled(*args, **kwargs)
        output = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), output)
        self._put_back()
        return output

    def first_run(self, compiled: Callable[..., Any]) -> tuple[Any, Compilation]:
        """The output of the call that compiles, and what was compiled."""
        before = inductor.compile_counts()
        start = time.perf_counter()
        output = self.run(compiled)
        self._synchronize()
        seconds = time.perf_counter() - start
        return output, Compilation(seconds, **{k: n - before[k] for k, n in inductor.compile_counts().items()})

    def _put_back(self) -> None:
        """Restore the buffers that the model writes to; the first run shows which those are."""
        if not self._state_is_known:
            self._state = [(buffer, saved) for buffer, saved in self._state if not _identical(buffer, saved)]
            self._state_is_known = True
        for buffer, saved in self._state:
            buffer.copy_(saved)

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, stock: Callable[..., Any], fused: Callable[..., Any], samples: int) -> Timing:
        """Time both in turn, on copies of the inputs that stay where they are."""
        args, kwargs = self.copied_inputs()

        def sample(compiled: Callable[..., Any], calls: int) -> float:
            start: Any
            if self.on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            else:
                start = time.perf_counter()
            for _ in range(calls):
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*args, **kwargs)
            if not self.on_gpu:
                return (time.perf_counter() - start) / calls
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / calls

        if self.on_gpu:
            for compiled in (stock, fused):
                sample(compiled, 3)  # a CUDA graph is recorded in the second call
        once = max(sample(stock, 1) + sample(fused, 1), 1e-6) / 2
        calls = max(1, min(100, round(SAMPLE_SECONDS / once)))
        samples = max(3, min(samples, round(TIMING_SECONDS / (2 * once * calls))))
        taken = [(sample(stock, calls), sample(fused, calls)) for _ in range(samples)]
        self._put_back()
        clock = "CUDA events" if self.on_gpu else "wall clock"
        its_stock, its_fused = (statistics.median(column) for column in zip(*taken, strict=True))
        return Timing(its_stock, its_fused, samples, clock)

    def in_fp32(self) -> Any:
        """The output of the model, run eagerly, with all 16-bit floating-point tensors in fp32.  FP8 stays FP8."""
        args, kwargs = pytree.tree_map_only(Tensor, _widened, self.copied_inputs())
        if not isinstance(self.model, nn.Module):
            return self.model(*args, **kwargs)
        model = copy.deepcopy(self.model)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = _widened(tensor.data)
        return model(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _identical(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, for every dtype."""
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
