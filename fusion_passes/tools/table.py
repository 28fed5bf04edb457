"""Tables in plain text, for reports that are read in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 120


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = WIDTH, indent: int = 2) -> str:
    """Columns as wide as their longest cell; the last one gets what is left of `width`, and is wrapped.

    A newline in a cell starts a new line of that cell.
    """
    cells = [[*header], *([*row] for row in rows)]
    last = len(header) - 1
    sizes = [max(len(line) for row in cells for line in row[column].split("\n")) for column in range(last)]
    left = max(width - indent - sum(sizes) - 2 * last, 20)
    lines = []
    for row in cells:
        columns = [cell.split("\n") for cell in row[:last]] + [wrap(row[last], left)]
        for number in range(max(map(len, columns))):
            texts = [column[number] if number < len(column) else "" for column in columns]
            padded = [text.ljust(size) for text, size in zip(texts, [*sizes, 0], strict=True)]
            lines.append((" " * indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def wrap(text: str, width: int) -> list[str]:
    """The lines of `text`, none longer than `width`; what continues a line is set in by two."""
    lines = []
    for line in text.split("\n"):
        lines += textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
    return lines


def paragraph(text: str, *, width: int = WIDTH, indent: int = 2) -> str:
    """`text` wrapped and set in."""
    return "\n".join(" " * indent + line for line in wrap(text, width - indent))


def plural(count: int, noun: str) -> str:
    """`1 place`, `2 places`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
