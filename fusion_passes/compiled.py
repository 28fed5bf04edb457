"""Compiled code outlives the process: the report of a graph that comes from Inductor's cache.

Inductor does not run the pass for code that it has in its cache.  But it asks the pass for its uuid before it looks,
and the loaded code brings back the counters that were stored with it, among them the id of the report that was written
when it was compiled (`inductor.mark_compiled`).  So a report that turns up after a manager was asked belongs to that
manager.
"""

from __future__ import annotations

import logging

from fusion_passes import inductor
from fusion_passes.report import GraphReport, Report

log = logging.getLogger(__name__)

_asking: Report | None = None
_seen: dict[str, int] = {}


def asking(report: Report) -> None:
    """The manager that writes into `report` is being asked for its uuid, or run: what is loaded next is its."""
    global _asking
    collect()
    _asking = report


def keep(result: GraphReport, *, on_disk: bool) -> None:
    """Tie the report of a graph to the code that is being compiled, and write it beside Inductor's cache."""
    _seen[result.graph_id] = _seen.get(result.graph_id, 0) + 1
    inductor.mark_compiled(result.graph_id)
    directory = inductor.reports_dir()
    if directory is None or not on_disk:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f"{result.graph_id}.tmp"
        unfinished.write_text(result.to_json())
        unfinished.replace(directory / f"{result.graph_id}.json")
    except OSError as error:
        log.warning("the report of graph %s is not kept beside the compiled code: %s", result.graph_id, error)


def collect() -> None:
    """Find the reports of graphs that were loaded from the cache since the last look."""
    marked = inductor.marked_graphs()
    for graph_id in _seen.keys() - marked.keys():
        del _seen[graph_id]  # somebody cleared the counters
    for graph_id, times in marked.items():
        before = _seen.get(graph_id, 0)
        for _ in range(times - before if times >= before else times):
            if _asking is not None:
                _asking.add(_load(graph_id))
        _seen[graph_id] = times


def _load(graph_id: str) -> GraphReport:
    directory = inductor.reports_dir()
    try:
        if directory is not None:
            result = GraphReport.from_json((directory / f"{graph_id}.json").read_text())
            result.log(log)
            return result
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.debug("no report for cached graph %s: %s", graph_id, error)
    return GraphReport(graph_id, from_cache=True, known=False)
