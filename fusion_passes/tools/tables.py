"""The tables in the docs that follow from rules and ops: `python -m fusion_passes.tools.tables docs/fusions.md`.

A table stands between two lines, and is written anew: `<!-- table: fusions -->`, or `<!-- table: kernels OP ... -->`
for what the kernels of some ops take, and `<!-- end of table -->`.
"""

import re
import sys
from pathlib import Path

from fusion_passes.compiler.config import ENV_PREFIX
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.fusions.rule import Level
from fusion_passes.ops.declare import OPS

MARKED = re.compile(r"^(<!-- table: (\w+)((?: \w+)*) -->\n).*?^(<!-- end of table -->)$", re.DOTALL | re.MULTILINE)
RESULTS = {
    Level.O1: "bit for bit the unfused graph's",
    Level.O2: "may be rounded less often than the unfused graph's",
}


def updated(page: str) -> str:
    """A page with its tables as they should be.  Raises KeyError for a table, or an op, that does not exist."""
    tables = {"fusions": fusions, "kernels": kernels}
    return MARKED.sub(lambda m: f"{m[1]}{tables[m[2]](*m[3].split())}\n{m[4]}", page)


def fusions() -> str:
    """The library's fusions: how to switch each, and what it does."""
    rows = [
        [f"`{rule.name}`", f"`{ENV_PREFIX}{rule.name.upper()}`", rule.level.name, rule.summary, RESULTS[rule.level]]
        for rule in FUSIONS
    ]
    return markdown(["switch in `PassConfig`", "environment", "level", "what it does", "result"], rows)


def kernels(*ops: str) -> str:
    """What the kernels of these ops take: a column for each kernel, a row for each limit."""
    behind = dict.fromkeys(kernel for op in ops for kernel in OPS[op])
    limits = [kernel.limits for kernel in behind]
    rows = [
        [about, *(each.get(about, "–") for each in limits)] for about in dict.fromkeys(a for x in limits for a in x)
    ]
    return markdown(["", *(kernel.name.removeprefix("the ") for kernel in behind)], rows)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(updated(path.read_text()))
