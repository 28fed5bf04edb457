"""What was measured, as data: the records that `benchmarks/` writes, one file for each fusion, suite and card.

Profitability reads them.  A size between two measured ones counts with the worse of both; one outside of all is not
measured.  To make a fusion profitable on another card, run its benchmark there with `--record fusion_passes/measured`.
A record that is older than its kernel stands in `stale.json` with the reason; it counts, and the sentence says so.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_passes.ops.support import device_capability, device_name

FOLDER = Path(__file__).parent
STALE = FOLDER / "stale.json"


@dataclass(frozen=True)
class Measurement:
    """`ratio`: time of stock `torch.compile` with its best backend over ours, at a `size` such as 512 tokens.
    `older`: the kernel has changed since."""

    size: int
    ratio: float
    older: bool = False


@dataclass(frozen=True)
class Verdict:
    """`ratio` is None where nobody measured; `why` is the sentence for the report."""

    ratio: float | None
    why: str

    @property
    def is_faster(self) -> bool:
        """True where it was measured, and the fused op was not slower."""
        return self.ratio is not None and self.ratio >= 1.0


@dataclass(frozen=True)
class Card:
    """A GPU by its name; by its compute capability where tensors are fake and no driver knows a name."""

    name: str | None
    capability: tuple[int, ...] | None

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card of a tensor's device."""
        return cls(device_name(device), device_capability(device))

    def __str__(self) -> str:
        if self.name is None and self.capability is None:
            return "a machine without a GPU"
        return self.name or f"a card of compute capability {'.'.join(map(str, self.capability or ()))}"

    def is_of(self, record: dict[str, Any]) -> bool:
        """True where the record was measured on this card, or on one of this compute capability if that is all."""
        if self.name is not None:
            return bool(record["card"] == self.name)
        return self.capability is not None and record["capability"] == list(self.capability)


@functools.cache
def records(fusion: str) -> tuple[dict[str, Any], ...]:
    """The records of one fusion, or of one section of a benchmark."""
    return tuple({"name": p.stem} | json.loads(p.read_text()) for p in sorted(FOLDER.glob(f"{fusion}*.json")))


def is_older(record: dict[str, Any], row: dict[str, Any], kernel: str | None = None) -> bool:
    """True where the row measured a kernel, or the one named, that has changed since: by `stale.json`, which a test
    holds against the sources.  Of a record of somebody's own, that table says nothing."""
    sources = row.get("sources", record.get("sources", {}))
    names = sources if kernel is None else [kernel]
    return any((record.get("name"), name, sources.get(name)) in _stale() for name in names)


@functools.cache
def _stale() -> frozenset[tuple[str, str, str]]:
    return frozenset((entry["record"], entry["kernel"], entry["measured"]) for entry in json.loads(STALE.read_text()))


def judge(measurements: list[Measurement], size: int | None, what: str, card: Card | str, unit: str) -> Verdict:
    """Whether it pays at `size`, by the measurements at the two neighbouring sizes.  unit: of a size, "tokens"."""
    if not measurements:
        return Verdict(None, f"{what} was not measured on {card}")
    if size is None:
        return Verdict(None, f"the number of {unit} is symbolic and has no example, so no measurement can be looked up")
    worst: dict[int, float] = {}
    for m in measurements:
        worst[m.size] = min(m.ratio, worst.get(m.size, m.ratio))
    below = max((n for n in worst if n <= size), default=None)
    above = min((n for n in worst if n >= size), default=None)
    if below is None or above is None:
        return Verdict(None, f"{what} was measured on {card} for {min(worst)} to {max(worst)} {unit}, not for {size}")
    ratio = min(worst[below], worst[above])
    at = f"{below} {unit}" if below == above else f"{below} and {above} {unit}"
    older = any(m.older and m.size in (below, above) for m in measurements)
    when = ", as measured before its last change" if older else ""
    return Verdict(ratio, f"{what} takes {1 / ratio:.2f} times as long as stock torch.compile on {card} at {at}{when}")
