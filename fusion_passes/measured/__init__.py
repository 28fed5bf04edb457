"""What was measured, as data: the records that `benchmarks/` writes, one file for each fusion, suite and card.

Profitability reads them.  A shape between two measured ones counts with the worse of both; one outside of all is not
measured.  To make a fusion profitable on another card, run its benchmark there with `--record fusion_passes/measured`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Measurement:
    """`ratio`: time of stock `torch.compile` with its best backend over ours, at sequences of `length`."""

    length: int
    ratio: float


@dataclass(frozen=True)
class Verdict:
    """`ratio` is None where nobody measured; `why` is the sentence for the report."""

    ratio: float | None
    why: str


@functools.cache
def records(fusion: str) -> tuple[dict[str, Any], ...]:
    """The records of one fusion, or of one section of a benchmark."""
    return tuple(json.loads(path.read_text()) for path in sorted(FOLDER.glob(f"{fusion}*.json")))


def judge(measurements: list[Measurement], length: int | None, what: str, card: str) -> Verdict:
    """Whether it pays at `length`, by the measurements at the two neighbouring lengths."""
    if not measurements:
        return Verdict(None, f"{what} was not measured on {card}")
    if length is None:
        return Verdict(None, "the length is symbolic and has no example, so no measurement can be looked up")
    worst: dict[int, float] = {}
    for m in measurements:
        worst[m.length] = min(m.ratio, worst.get(m.length, m.ratio))
    below = max((n for n in worst if n <= length), default=None)
    above = min((n for n in worst if n >= length), default=None)
    if below is None or above is None:
        return Verdict(
            None, f"{what} was measured on {card} for lengths from {min(worst)} to {max(worst)}, not for {length}"
        )
    ratio = min(worst[below], worst[above])
    at = f"length {below}" if below == above else f"lengths {below} and {above}"
    return Verdict(ratio, f"{what} takes {1 / ratio:.2f} times as long as stock torch.compile on {card} at {at}")
