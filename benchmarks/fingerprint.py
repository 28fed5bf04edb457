"""Which sources a record measured: a fingerprint of each kernel, and the records whose kernels have changed since.

    python benchmarks/fingerprint.py

prints what has to be measured again, with the commands.  A fingerprint covers what a launch runs: the public functions
of a kernel's module and everything that these use of it and of the other modules of `kernels/`, and what of `ops/`
chooses between kernels.  Comments, docstrings and the layout of the source do not count, and neither does what only
explains why a kernel does not take a call.  It is the same for every version of Python.

A record that was not made again after a change stands in `fusion_passes/measured/stale.json`, with the reason: who
measures again removes it there.
"""

import ast
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STALE = "fusion_passes/measured/stale.json"
KERNELS = "fusion_passes/kernels/{}.py"
PAGED = ("paged_decode", "paged_prefill", "paged_prefill_sm90")
CHOICE = dict.fromkeys(PAGED, "fusion_passes/ops/paged_attention.py")
"""Kernel -> the module of its op: which sequences it gets says the function there that launches kernels."""

MEASURED, RESULTS = "fusion_passes/measured", "benchmarks/results"


def _records() -> Iterator[tuple[str, tuple[tuple[str, ...], str]]]:
    for file in sorted((ROOT / "benchmarks").glob("*.py")):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "RECORDS":
                for name, (kernels, options, folder) in ast.literal_eval(statement.value).items():
                    command = ["python", f"benchmarks/{file.name}", *options.split(), "--record", folder]
                    yield name, (kernels, " ".join(command))


RECORDS: Mapping[str, tuple[tuple[str, ...], str]] = dict(_records())
"""Record of times, by the name of its file -> the kernels that it measures, and the command that makes it.  Each
benchmark has a table RECORDS of its own: name -> kernels, options, folder."""


def read(path: str) -> str:
    """A source file of this checkout."""
    return (ROOT / path).read_text()


def fingerprint(kernel: str, read: Callable[[str], str] = read) -> str:
    """Of a kernel's module, "paged_decode"; of another state of the sources where `read` reads those."""
    digest = hashlib.sha256()
    module = functools.cache(lambda name: _Module(ast.parse(read(KERNELS.format(name)))))
    used: set[tuple[str, int]] = set()
    work = [(kernel, name) for name in module(kernel).entries()]
    while work:
        where, name = work.pop()
        for place in set(module(where).places.get(name, ())) - {place for seen, place in used if seen == where}:
            used.add((where, place))
            imported = module(where).imported
            work += (imported.get(other, (where, other)) for other in _names(module(where).body[place]))
    for where, place in sorted(used):
        digest.update(f"{where} {_text(module(where).body[place])}\n".encode())
    if kernel in CHOICE:
        functions = (x for x in ast.parse(read(CHOICE[kernel])).body if isinstance(x, ast.FunctionDef))
        launching = [_text(function.body) for function in functions if _launches(function)]
        if not launching:
            raise ValueError(f"no function of {CHOICE[kernel]} calls `launch` of a kernel's module")
        digest.update("\n".join(launching).encode())
    return digest.hexdigest()[:16]


def fingerprints(record: str) -> dict[str, str]:
    """Those of the kernels that a record measures, for the record."""
    kernels, _ = RECORDS[record]
    return {kernel: fingerprint(kernel) for kernel in kernels}


class _Module:
    """imported: names from other modules of `kernels/` -> module and name there.  places: names that it defines -> the
    statements that do."""

    def __init__(self, tree: ast.Module) -> None:
        prefix = "fusion_passes.kernels."
        self.body = tree.body
        self.imported = {
            alias.asname or alias.name: (node.module.removeprefix(prefix), alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(prefix)
            for alias in node.names
        }
        self.places: dict[str, list[int]] = {}
        for place, statement in enumerate(self.body):
            for name in _defines(statement):
                self.places.setdefault(name, []).append(place)

    def entries(self) -> Iterator[str]:
        """What others call, but to ask why a kernel does not take a call."""
        for statement in self.body:
            if isinstance(statement, ast.FunctionDef) and not statement.name.startswith(("_", "why_")):
                yield statement.name


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target is not None for node in ast.walk(target) if type(node) is ast.Name]


def _launches(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "launch"
        for node in ast.walk(function)
    )


def _names(statement: ast.stmt) -> Iterator[str]:
    return (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))


def _text(item: object) -> str:
    """A piece of syntax as text, without docstrings and what only some versions of Python have."""
    if isinstance(item, list):
        item = [x for x in item if not _is_docstring(x)]
        return "[" + ",".join(_text(x) for x in item) + "]"
    if isinstance(item, ast.Constant):
        return f"{type(item.value).__name__}:{item.value!r}"
    if not isinstance(item, ast.AST):
        return repr(item)
    fields = dict(ast.iter_fields(item))
    told = (
        f"{name}={_text(x)}" for name, x in fields.items() if x not in (None, []) and name not in ("ctx", "type_params")
    )
    return f"{type(item).__name__}({','.join(told)})"


def _is_docstring(item: object) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)


@dataclass(frozen=True)
class Stale:
    """A record, or some rows of it, that measured a kernel whose source has changed since.

    measured, now: the fingerprints of the source that was measured and of today's."""

    record: str
    kernel: str
    measured: str
    now: str
    rows: int

    def __str__(self) -> str:
        _, command = RECORDS[self.record]
        return (
            f"{self.record}.json: {self.rows} rows measured {self.kernel} as it was at fingerprint {self.measured}, it "
            f"is {self.now} now: {command}"
        )


def paths() -> list[Path]:
    """The files of all records of kernels."""
    return sorted(p for folder in (MEASURED, RESULTS) for p in (ROOT / folder).glob("*.json") if p.stem in RECORDS)


def measured(record: Mapping[str, object]) -> Iterator[Mapping[str, str]]:
    """For each row the fingerprints of the kernels that it measured: its own, else those of the whole record."""
    for row in record["rows"]:  # type: ignore[attr-defined]
        yield row.get("sources", record["sources"])


def stale() -> list[Stale]:
    """All that is older than its kernel."""
    found: list[Stale] = []
    for path in paths():
        rows = [*measured(json.loads(path.read_text()))]
        kernels, _ = RECORDS[path.stem]
        for kernel in kernels:
            now = fingerprint(kernel)
            states = Counter(row[kernel] for row in rows)
            found += (Stale(path.stem, kernel, old, now, n) for old, n in sorted(states.items()) if old != now)
    return found


def known() -> dict[Stale, str]:
    """What stands in the table -> the reason."""
    entries = json.loads(read(STALE))
    return {Stale(**{name: x for name, x in entry.items() if name != "why"}): entry["why"] for entry in entries}


def main() -> None:
    """Print what is older than its kernel."""
    table = known()
    for item in stale():
        print(item)
        print(f"    {table.get(item, 'NOT IN ' + STALE)}")
        print(f"    {json.dumps(asdict(item))}")


if __name__ == "__main__":
    main()
