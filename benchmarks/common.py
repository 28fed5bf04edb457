"""What the benchmarks share: times inside CUDA graphs, the copy bandwidth to compare with, and the record's header,
with what says which state of the kernels was measured (`fingerprint`).

Contenders run inside CUDA graphs, so that launches cost none of them anything, and take turns, so that all see the same
clocks.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from fingerprint import fingerprints
from triton.runtime.errors import OutOfResources

Call = Callable[[], object]

DECLINED = ("No available kernel", "cuDNN Frontend error")
"""What torch says, in a RuntimeError, where an SDPA backend does not take a call; all other errors are failures."""


def needs_a_card(parser: argparse.ArgumentParser) -> None:
    """End the program with a sentence where there is nothing to measure on."""
    if not torch.cuda.is_available():
        parser.error("needs a CUDA card")


def why_declined(error: Exception) -> str | None:
    """The line that says so, where a backend declines or a configuration does not fit on the card; None for a
    failure."""
    lines = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, OutOfResources):
        return lines[0]
    if not isinstance(error, RuntimeError):
        return None
    return next((line for line in lines for text in DECLINED if text in line), None)


def capture(functions: Sequence[Call], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls, of each function in turn."""
    torch.cuda.synchronize()  # another stream does not wait for what makes the inputs
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            functions[i % len(functions)]()
    return graph


def microseconds(
    functions: Mapping[str, Call | Sequence[Call]], milliseconds: float = 60.0, declined: dict[str, str] | None = None
) -> dict[str, float]:
    """Median time of one call of each contender, inside graphs that are replayed in turn.

    A contender may be several functions that do the same with other data, for a cold L2: they are called in turn.
    declined: takes the names and reasons of contenders that cannot run here (`why_declined`), which are left out;
    without it, and for every other error, the error is raised.
    """
    graphs = {}
    for name, contender in functions.items():
        turns = [contender] if callable(contender) else contender
        try:
            graph = capture(turns, len(turns))
        except (RuntimeError, OutOfResources) as error:
            why = why_declined(error)
            if declined is None or why is None:
                raise
            declined[name] = why
            torch.cuda.synchronize()
            continue
        # So long that the start of a replay, some microseconds, is next to nothing.
        rounds = max(1, min(60, round(3000 / max(1.0, replay(graph)))))
        calls = rounds * len(turns)
        graphs[name] = (capture(turns, calls), calls)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    spent = 0.0
    while spent < milliseconds * 1e3 * len(graphs) or (graphs and len(next(iter(times.values()))) < 5):
        for name, (graph, calls) in graphs.items():
            taken = replay(graph)
            spent += taken
            times[name].append(taken / calls)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def copy(size: int = 1 << 29) -> tuple[Call, int]:
    """A kernel that copies memory (and inverts it), to compare with in the same run, and the bytes that it moves.

    `Tensor.copy_` in a CUDA graph is a copy without a kernel, which reaches two thirds of this.
    """
    source = torch.randint(0, 1 << 30, (size // 4,), device="cuda", dtype=torch.int32)
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target), 2 * size


def machine() -> dict[str, object]:
    """What figures were measured on, and when."""
    import triton

    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "capability": list(torch.cuda.get_device_capability()),
    }


def write(path: Path, figures: Mapping[str, object]) -> None:
    """The figures, after what they were measured on and the fingerprints of the kernels, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = machine() | {"sources": fingerprints(path.stem)}
    path.write_text(json.dumps(header | dict(figures), indent=1) + "\n")
