"""Compiled code outlives the process: its key in Inductor's cache, and the report of a graph that comes from there.

Inductor does not run the pass for code that it has in its cache.  But it asks the pass for its uuid before it looks,
and the loaded code brings back the counters that were stored with it, among them the id of the report that was written
when it was compiled, and how many places each rule had (`inductor.mark_compiled`).  So a report that turns up after a
manager was asked belongs to that manager.  It is looked for when Dynamo has finished a compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from fusion_passes import inductor
from fusion_passes.report import GraphReport
from fusion_passes.rule import Rule

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent


class Asked(Protocol):
    """Who is told about graphs: the manager that Inductor asked."""

    def take(self, result: GraphReport) -> None:
        """What happened to a graph."""

    def finished(self) -> None:
        """Dynamo's compilation is over: no further graph of it will come."""


_asking: Asked | None = None
_seen: dict[str, int] = {}


def key(config_key: str, rules: Iterable[Rule[Any]]) -> str | None:
    """Key of all that decides what the passes make of a graph: the package's source, the config, and the user's rules
    with the source of their modules (not of modules that those import).  The same in every process.

    None, so that nothing is cached, where a rule's source cannot be had: it could change unseen.
    """
    digest = hashlib.sha256(_package_source())
    try:
        texts = [config_key, *(text for rule in rules for text in _rule_texts(rule))]
    except (OSError, TypeError) as error:
        log.warning("compiled code is not cached: %s", error)
        return None
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _rule_texts(rule: Rule[Any]) -> Iterator[str]:
    """A rule's class and fields as text; for a class or a function, the source of the module that it comes from."""
    yield from (rule.name, _module_source(type(rule)))
    for f in dataclasses.fields(rule):
        yield f.name
        yield from _value_texts(getattr(rule, f.name))


def _value_texts(item: object) -> Iterator[str]:
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from _value_texts(part)
    elif inspect.isfunction(item):
        yield f"{item.__qualname__}{item.__defaults__}"
        yield _module_source(item)
        for cell in item.__closure__ or ():
            yield from _value_texts(cell.cell_contents)
    elif isinstance(item, torch.Tensor):
        yield f"{item.dtype}{list(item.shape)}"
    else:
        yield repr(item)


@functools.cache
def _package_source() -> bytes:
    """Digest of every source file of the package; the kernels' too, since their layouts are baked into cached code."""
    digest = hashlib.sha256()
    for file in sorted(p for kind in ("*.py", "*.json") for p in PACKAGE.rglob(kind)):
        digest.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    return digest.digest()


@functools.cache
def _module_source(thing: Callable[..., Any]) -> str:
    module = inspect.getmodule(thing)
    try:
        return inspect.getsource(module if module is not None else thing)
    except (OSError, TypeError) as error:
        raise OSError(f"no source for {thing.__module__}.{thing.__qualname__}: put it into a file") from error


def asking(manager: Asked) -> None:
    """This manager is being asked for its uuid, or run: what is loaded next is its."""
    global _asking
    collect()
    _asking = manager


def asked() -> bool:
    """Whether a manager was asked for its uuid, or run, since Dynamo last began to compile something."""
    return _asking is not None


def _begin() -> None:
    global _asking
    collect()
    _asking = None


def _end() -> None:
    collect()
    if _asking is not None:
        _asking.finished()


def keep(result: GraphReport, *, on_disk: bool) -> None:
    """Tie the report of a graph to the code that is being compiled: its numbers travel with the code, all of it is
    written beside Inductor's cache."""
    mark = f"{result.graph_id}:{result.numbers()}"
    _seen[mark] = _seen.get(mark, 0) + 1
    inductor.mark_compiled(mark)
    directory = inductor.reports_dir()
    if directory is None or not on_disk:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f"{result.graph_id}.tmp"
        unfinished.write_text(result.to_json())
        unfinished.replace(directory / f"{result.graph_id}.json")
    except OSError as error:
        log.warning("places and reasons of graph %s are not kept beside the compiled code: %s", result.graph_id, error)


def collect() -> None:
    """Find the reports of graphs that were loaded from the cache since the last look."""
    marks = inductor.marks()
    for mark in _seen.keys() - marks.keys():
        del _seen[mark]  # somebody cleared the counters
    for mark, times in marks.items():
        before = _seen.get(mark, 0)
        _seen[mark] = times
        for _ in range(times - before if times >= before else times):
            if _asking is not None:
                _asking.take(_load(mark))


def _load(mark: str) -> GraphReport:
    """The report as it was written; where it is not there, what the mark itself says."""
    graph_id, _, numbers = mark.partition(":")
    directory = inductor.reports_dir()
    try:
        if directory is not None:
            return GraphReport.from_json((directory / f"{graph_id}.json").read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.debug("no report for cached graph %s: %s", graph_id, error)
    return GraphReport.from_numbers(graph_id, numbers)


inductor.on_compilation(start=_begin, end=_end)
