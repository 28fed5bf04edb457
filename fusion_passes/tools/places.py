"""Places of a report for a reader: those that are alike together, with short paths."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Locations:
    """Places in like modules at one source line."""

    count: int
    text: str


def alike(items: Iterable[tuple[T, str]]) -> list[tuple[T, Locations]]:
    """Items that differ in nothing but the number of their layer, together.  An item is what it is, and its place."""
    groups: dict[tuple[T, str, str], list[str]] = {}
    for item, where in items:
        module, line = split_place(where)
        groups.setdefault((item, re.sub(r"\d+", "#", module), line), []).append(module)
    found = []
    for (item, _, line), modules in groups.items():
        text = f"in {merged_names(modules)}\n" * bool(modules[0]) + f"at {shorten_path(line)}" * bool(line)
        found.append((item, Locations(len(modules), text.rstrip("\n"))))
    return found


def split_place(where: str) -> tuple[str, str]:
    """The module and the source line of a place in a report; either can be "" where the graph does not know it."""
    module, comma, line = where.partition(", ")
    if not re.fullmatch(r"[\w.]+", module):
        return "", where
    return (module, line) if comma else ("", where)


def merged_names(names: Sequence[str]) -> str:
    """`layers.[0-2,5].attn` for names that differ in one number; `*` in place of numbers where several differ."""
    numbers = [re.findall(r"\d+", name) for name in names]
    varying = [position for position, column in enumerate(zip(*numbers, strict=True)) if len({*column}) > 1]
    pieces = re.split(r"\d+", names[0])
    text = pieces[0]
    for position, piece in enumerate(pieces[1:]):
        if position not in varying:
            number = numbers[0][position]
        elif len(varying) > 1:
            number = "*"
        else:
            number = f"[{_ranges(sorted({int(row[position]) for row in numbers}))}]"
        text += number + piece
    return text


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shorten_path(where: str) -> str:
    """`file:line: code` with the file relative to the current directory, or from its package on in site-packages."""
    for marker in ("site-packages/", "dist-packages/"):
        if marker in where.split(":")[0]:
            return where.split(marker, 1)[1]
    return where.removeprefix(f"{Path.cwd()}/")
