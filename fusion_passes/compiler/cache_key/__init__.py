"""The key of compiled code in Inductor's cache: of all that decides what the passes make of a graph.

Inductor keys the graph, its own settings, torch, Triton and the card.  Here are the package's files, the settings, and
the user's rules, each with all that it reaches (`reach`) and with what `TracedRule` makes of its examples.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import fusion_passes
from fusion_passes.compiler.cache_key import origin, reach
from fusion_passes.fusions.rule import Rule

log = logging.getLogger(__name__)

PACKAGE = Path(fusion_passes.__file__).parent

_told: set[str] = set()


def key(config_key: str, rules: Iterable[Rule[Any]]) -> str | None:
    """Key of the package's source, the settings and the rules of a user.  The same in every process.

    None, so that nothing is cached, where something cannot be keyed; a warning says what and what to do, once for each
    reason.
    """
    try:
        parts = [_package(), config_key, *_cards(), *(_of(rule) for rule in rules)]
    except reach.UnkeyableError as error:
        reason = f"{error}. {error.remedy}"
    except Exception as error:  # of a property, or of an import, of the user's
        reason = (
            f"reading the rules raised {type(error).__name__}: {error}. Mend what raises it, in the rules' own code."
        )
    else:
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
    if reason not in _told:
        _told.add(reason)
        log.warning(
            "fusion_passes: compiled code is not kept in Inductor's cache, where it could become stale: %s", reason
        )
    return None


def _of(rule: Rule[Any]) -> str:
    """Of a user's rule: all that it reaches, and what it makes of its examples."""
    functions = (item for item in vars(rule).values() if isinstance(item, types.FunctionType))
    packages = {str(item.__module__).partition(".")[0] for item in (*type(rule).__mro__, *functions)}
    own = {package for package in packages if _is_of_a_user(package)}
    try:
        state = reach.digest(rule, own)
        return state + _products(rule, own, state)
    except reach.UnkeyableError as error:
        raise reach.UnkeyableError(f"of the rule {rule.name!r}, {error}", error.remedy) from error


def _is_of_a_user(package: str) -> bool:
    version = origin.version(package)
    return version is None or not version.startswith(("python ", "torch ", "fusion_passes"))


_traced: dict[str, str] = {}


def _products(rule: Rule[Any], own: set[str], state: str) -> str:
    """Tracing takes milliseconds, so it is done once for each state of all that the rule reaches."""
    if state not in _traced:
        _traced[state] = reach.digest(rule._cache_products(), own)
    return _traced[state]


def _cards() -> list[str]:
    """All cards that a graph may be for; Inductor keys the current one.  The rules look at the card of the tensors."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _package() -> str:
    digest, touched = _files()
    if touched:
        raise reach.UnkeyableError(
            f"{touched} was touched on disk after this process had imported the package, so what runs may be older",
            "Start the process again.",
        )
    return digest


@functools.cache
def _files() -> tuple[str, str]:
    """Digest of every source file of the package and of its measurements; the kernels' too, since their layouts are
    baked into cached code.  And the file, if any, that is newer than what this process has imported."""
    digest = hashlib.sha256()
    touched = ""
    now = time.time()  # a time after it is none of a change: the clock of another machine
    for file in sorted(p for kind in ("*.py", "*.json") for p in PACKAGE.rglob(kind)):
        name = str(file.relative_to(PACKAGE))
        status = file.stat()
        if fusion_passes.IMPORTED_AT < max(status.st_mtime, status.st_ctime) <= now:
            touched = touched or name
        digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest(), touched
