"""Compiled code outlives the process: the report of a graph that comes from Inductor's cache.

Inductor does not run the pass for code that it has in its cache.  But it asks the pass for its uuid before it looks,
and the loaded code brings back the counters that were stored with it, among them the id of the report that was written
when it was compiled, and how many places each rule had (`inductor.mark_compiled`).  So a report that turns up after a
manager was asked belongs to that manager.  It is looked for when Dynamo has finished a compilation.

Dynamo compiles in one thread at a time.  While it does, only that thread asks and collects: a uuid that another one
wants, or a report that it reads, has nothing to do with the code that is being loaded.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from fusion_passes.compiler import inductor
from fusion_passes.compiler.report import GraphReport

log = logging.getLogger(__name__)


class Asked(Protocol):
    """Who is told about graphs: the manager that Inductor asked."""

    def take(self, result: GraphReport) -> None:
        """What happened to a graph."""

    def finished(self) -> None:
        """Dynamo's compilation is over: no further graph of it will come."""


_asking: Asked | None = None
_seen: dict[str, int] = {}
_compiling: int | None = None
"""The thread in which Dynamo compiles something."""


def asking(manager: Asked) -> None:
    """This manager is being asked for its uuid, or run: what is loaded next is its."""
    global _asking
    if not _is_elsewhere():
        collect()
        _asking = manager


def asked() -> bool:
    """Whether a manager was asked for its uuid, or run, since Dynamo last began to compile something."""
    return _asking is not None


def _is_elsewhere() -> bool:
    """Whether Dynamo compiles in another thread right now."""
    return _compiling not in (None, threading.get_ident())


def _begin() -> None:
    global _asking, _compiling
    collect()
    _asking, _compiling = None, threading.get_ident()


def _end() -> None:
    global _compiling
    collect()
    _compiling = None
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
    """Find the reports of graphs that were loaded from the cache since the last look.  While Dynamo compiles in another
    thread they are that thread's to find, when it has finished."""
    if _is_elsewhere():
        return
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
