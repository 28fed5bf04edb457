"""What the passes did: every place that a rule looked at, what became of it, and why."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fusion_passes.config import SWITCHES, unknown
from fusion_passes.rule import MatchStatus


class RequiredFusionError(RuntimeError):
    """A fusion that the config requires was applied nowhere."""


@dataclass(frozen=True)
class Site:
    """A place where a rule's pattern was found."""

    rule: str
    status: MatchStatus
    reason: str
    """Why it was declined; "" where it was fused."""
    where: str
    """The module and the user's source line; the node's name where the graph knows neither."""
    what: str
    """Shapes, dtypes and options in a few words."""


@dataclass(frozen=True)
class Miss:
    """A place that nearly matched."""

    what: str
    reason: str
    where: str


@dataclass(frozen=True)
class GraphReport:
    """What happened to one compiled graph."""

    graph_id: str
    sites: tuple[Site, ...] = ()
    misses: tuple[Miss, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of each stage: recognise, fuse, clean."""
    nodes_before: int = 0
    nodes_after: int = 0
    from_cache: bool = False
    """The compiled code came from Inductor's cache: the passes did not run now, this is what they did then."""
    known: bool = True
    """False where the code came from the cache and what was fused then is not on disk any more."""

    @property
    def fused(self) -> int:
        """Number of sites that were fused."""
        return sum(site.status is MatchStatus.FUSED for site in self.sites)

    def to_json(self) -> str:
        """All of it as JSON, to be kept beside the compiled code."""
        return json.dumps(dataclasses.asdict(self))

    def log(self, log: logging.Logger) -> None:
        """A line for the graph at level INFO, one for each site at DEBUG."""
        for site in self.sites:
            reason = f": {site.reason}" if site.reason else ""
            log.debug("%s %s at %s%s", site.status, site.rule, site.where, reason)
        if self.sites:
            cached = " (from cache)" if self.from_cache else ""
            log.info("graph %s%s: %d of %d sites fused", self.graph_id, cached, self.fused, len(self.sites))

    @classmethod
    def from_json(cls, text: str) -> GraphReport:
        """Read back what `to_json` wrote, marked as coming from the cache."""
        data: dict[str, Any] = json.loads(text)
        data["sites"] = tuple(Site(**s | {"status": MatchStatus(s["status"])}) for s in data["sites"])
        data["misses"] = tuple(Miss(**m) for m in data["misses"])
        return cls(**data | {"from_cache": True})


class Report:
    """What the passes did, over all graphs that were compiled with it.

    Graphs appear when they are compiled: at the first call of the compiled model, not at `torch.compile`.
    """

    def __init__(self) -> None:
        self._graphs: list[GraphReport] = []
        self._collect: Callable[[], None] = lambda: None
        self._rules = set(SWITCHES)

    def add(self, graph: GraphReport) -> None:
        """Take in what happened to one graph."""
        self._graphs.append(graph)

    def on_read(self, collect: Callable[[], None]) -> None:
        """Call `collect` before the report is read: graphs that came from the cache are found late."""
        self._collect = collect

    def knows(self, rules: Iterable[str]) -> None:
        """These are names of fusions too: of rules that are not built in."""
        self._rules |= set(rules)

    @property
    def graphs(self) -> tuple[GraphReport, ...]:
        """One entry per compiled graph, in the order of compilation."""
        self._collect()
        return tuple(self._graphs)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all graphs."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    def count(self, status: MatchStatus = MatchStatus.FUSED, rule: str | None = None) -> int:
        """Number of sites with this status."""
        return sum(site.status is status and rule in (None, site.rule) for site in self.sites)

    def declined(self, rule: str) -> Iterator[str]:
        """For each place where this rule was not applied, the sentence why."""
        for graph in self.graphs:
            for site in graph.sites:
                if site.rule == rule and site.status not in (MatchStatus.FUSED, MatchStatus.MOVED):
                    yield f"{site.where}: {site.status}: {site.reason}"
            for miss in graph.misses:
                yield f"{miss.where}: {miss.what}: {miss.reason}"

    def why_not(self, rule: str) -> str:
        """Why this rule was applied nowhere, a line for each place."""
        if any(not graph.known for graph in self.graphs):
            return "the compiled code came from a cache and does not say: clear Inductor's cache directory"
        return "\n  ".join(self.declined(rule)) or "no compiled graph has a place for it"

    def require(self, rule: str) -> None:
        """Raise RequiredFusionError if this rule was applied nowhere, ValueError if there is none of this name."""
        if rule not in self._rules:
            raise ValueError(unknown("fusion", rule, self._rules))
        if self.count(rule=rule) == 0:
            raise RequiredFusionError(f"{rule} is required and was applied nowhere:\n  {self.why_not(rule)}")

    def __str__(self) -> str:
        graphs = self.graphs
        if not graphs:
            return (
                "fusion_passes: no graph was compiled with the passes; compilation happens at the first call, "
                "and only Inductor runs them"
            )
        lines = []
        for number, graph in enumerate(graphs):
            cached = ""
            if graph.from_cache:
                cached = " (from cache)" if graph.known else " (from cache; what was fused is not on disk any more)"
            total = sum(graph.seconds.values()) * 1e3
            lines.append(
                f"graph {number}{cached}: {graph.fused} fused, "
                f"{len(graph.sites)} sites, {graph.nodes_before} -> {graph.nodes_after} nodes, {total:.1f} ms"
            )
            for site in graph.sites:
                lines.append(f"  {site.status:12} {site.rule}  {site.what}")
                lines.append(f"  {'':12} at {site.where}")
                if site.reason:
                    lines.append(f"  {'':12} because {site.reason}")
            for miss in graph.misses:
                lines.append(f"  {'near miss':12} {miss.what}  at {miss.where}")
                lines.append(f"  {'':12} because {miss.reason}")
        return "\n".join(lines)
