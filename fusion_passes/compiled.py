"""Compiled code outlives the process: its key in Inductor's cache, and the report of a graph that comes from there.

Inductor does not run the pass for code that it has in its cache.  But it asks the pass for its uuid before it looks,
and the loaded code brings back the counters that were stored with it, among them the id of the report that was written
when it was compiled (`inductor.mark_compiled`).  So a report that turns up after a manager was asked belongs to that
manager.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fusion_passes import inductor
from fusion_passes.report import GraphReport, Report
from fusion_passes.rule import Rule

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent

_asking: Report | None = None
_seen: dict[str, int] = {}


def key(config_key: str, rules: Iterable[Rule[Any]]) -> str:
    """Key of all that decides what the passes make of a graph: the package's source, the config, and the user's rules
    with the source of their modules.  The same in every process."""
    digest = hashlib.sha256(_package_source())
    for text in (config_key, *(text for rule in rules for text in _rule_texts(rule))):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _rule_texts(rule: Rule[Any]) -> Iterator[str]:
    """A rule's class and fields as text; for a class or a function, the source of the module that it comes from."""
    yield from (rule.name, _module_source(type(rule)))
    for f in dataclasses.fields(rule):
        option = getattr(rule, f.name)
        for item in option if isinstance(option, tuple) else (option,):
            if inspect.isfunction(item):
                closure = [cell.cell_contents for cell in item.__closure__ or ()]
                yield f"{f.name}={item.__qualname__}{item.__defaults__}{closure}"
                yield _module_source(item)
            elif isinstance(item, torch.Tensor):
                yield f"{f.name}={item.dtype}{list(item.shape)}"
            else:
                yield f"{f.name}={item!r}"


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
    except (OSError, TypeError):
        name = f"{thing.__module__}.{thing.__qualname__}"
        log.warning("no source for %s: it cannot be part of the cache key, so a change of it goes unseen", name)
        return name


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
        (directory / f"{result.graph_id}.json").write_text(result.to_json())
    except OSError as error:
        log.warning("the report of graph %s is not kept beside the compiled code: %s", result.graph_id, error)


def collect() -> None:
    """Find the reports of graphs that were loaded from the cache since the last look."""
    for graph_id, times in inductor.marked_graphs().items():
        for _ in range(times - _seen.get(graph_id, 0)):
            if _asking is not None:
                _asking.add(_load(graph_id))
        _seen[graph_id] = times


def _load(graph_id: str) -> GraphReport:
    directory = inductor.reports_dir()
    try:
        if directory is not None:
            return GraphReport.from_json((directory / f"{graph_id}.json").read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.debug("no report for cached graph %s: %s", graph_id, error)
    return GraphReport(graph_id, from_cache=True, known=False)
