"""All sentences that the code may give as a reason, from its source: f-strings as patterns."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fusion_passes"
FILES = sorted(
    [
        *(
            PACKAGE / name
            for name in ("graph/rewrite.py", "graph/match.py", "graph/read.py", "fusions/traced/matcher.py")
        ),
        *(path for folder in ("fusions", "idioms", "measured") for path in (PACKAGE / folder).glob("*.py")),
        *(PACKAGE / "ops" / name for name in ("attention_quant.py", "kernel.py", "kv_cache_write.py")),
    ]
)
"""Where reasons come from."""
OPS = sorted(path for path in (PACKAGE / "ops").glob("*.py") if path.name != "declare.py")
"""Where an op says why it refuses a call, or its kernel does not take it; `declare` raises on import only."""
ARGUMENT = {"require": 1, "DeclinedError": 0, "Unread": 1, "fail": 0, "NearMiss": 2, "Verdict": 1}
"""Calls that take a reason, and at which place."""
VARIABLES = frozenset({"reason", "goes", "why"})
"""Names that hold one on its way there."""


@dataclass(frozen=True)
class Sentence:
    """where: file and line.  pattern: of the whole sentence, or, with `part`, of a part of one."""

    where: str
    text: str
    pattern: str
    part: bool

    def is_shown_by(self, sentence: str) -> bool:
        match = re.search if self.part else re.fullmatch
        return match(self.pattern, sentence, re.DOTALL) is not None


def sentences() -> list[Sentence]:
    """In the order of files and lines."""
    return _found(FILES, _reasons)


def refusals() -> list[Sentence]:
    """What the ops raise, and say of their kernels."""
    return _found(OPS, lambda tree: (*_raised(tree), *_returned(tree)))


def _found(files: list[Path], say: Callable[[ast.AST], Iterable[tuple[int, ast.expr, bool]]]) -> list[Sentence]:
    found = []
    for path in files:
        for line, expression, part in say(ast.parse(path.read_text())):
            for text, pattern in _patterns(expression):
                if " " in text and re.search(r"[a-z]{4}", text):  # others are put together from sentences
                    found.append(Sentence(f"{path.relative_to(PACKAGE)}:{line}", text, pattern, part))
    return sorted(found, key=lambda sentence: (sentence.where.split(":")[0], int(sentence.where.split(":")[1])))


def _reasons(tree: ast.AST) -> Iterator[tuple[int, ast.expr, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ARGUMENT and len(node.args) > ARGUMENT[name]:
                yield node.lineno, node.args[ARGUMENT[name]], False
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in VARIABLES:
            yield node.lineno, node.value, False
    yield from _returned(tree)


def _raised(tree: ast.AST) -> Iterator[tuple[int, ast.expr, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.lineno, node.exc.args[0], False


def _returned(tree: ast.AST) -> Iterator[tuple[int, ast.expr, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in ("__str__", "describe", "_shape"):
            returns = ast.unparse(node.returns) if node.returns is not None else ""
            if returns in ("str", "str | None"):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield inner.lineno, inner.value, True


def _patterns(expression: ast.expr) -> list[tuple[str, str]]:
    """The text with {} for what is filled in, and the pattern; of a choice each."""
    if isinstance(expression, ast.IfExp):
        return _patterns(expression.body) + _patterns(expression.orelse)
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return [(expression.value, re.escape(expression.value))]
    if isinstance(expression, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in expression.values]
        text = "".join("{}" if part is None else str(part) for part in parts)
        return [(text, "".join(".+" if part is None else re.escape(str(part)) for part in parts))]
    return []
