"""What the passes did: every place that a rule looked at, what became of it, and why."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fusion_passes.compiler.config import SWITCHES, unknown
from fusion_passes.fusions.rule import MatchStatus

log = logging.getLogger("fusion_passes")

MOVES = "in_place_writes"
"""The switch of what is listed as a `Move`; no rule."""
NOTHING_COMPILED = (
    "no graph was compiled with the passes so far. torch.compile compiles at the first call, so call the model first "
    "(inside the block, for `enabled`); what was compiled before stays as it is until torch.compiler.reset(). Only "
    "Inductor runs the passes, and only where TORCH_COMPILE_DISABLE, torch.compiler.set_stance or Inductor's own "
    "settings (use_post_grad_passes, disabled_passes) have not switched it off; an explicit compile or an inner block "
    "goes before `enabled` and `enable`"
)
NOT_TOLD = (
    "Inductor loaded code from its cache, or compiled some, and did not say what the passes did, since its counters "
    "(torch._dynamo.utils.counters) were cleared: compile anew with torch._inductor.config.force_disable_caches = True"
)
LOST_PLACE = "a place that is not on disk any more"
NOT_ON_DISK = "not on disk any more: clear Inductor's cache directory to compile anew"


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
class Move:
    """A write that stays in place, since reads of what it overwrites were moved in front of it.  Nothing was fused."""

    where: str
    what: str
    """The op that writes, and those that read."""


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
    """False where the code came from the cache and its report is not on disk any more.  How many places each rule had
    comes with the code; what and where they are, and the reasons, are lost."""
    rules: tuple[str, ...] | None = None
    """Names of the rules that were on; None where nobody said."""
    moves: tuple[Move, ...] = ()

    @property
    def fused(self) -> int:
        """Number of sites that were fused."""
        return sum(site.status is MatchStatus.FUSED for site in self.sites)

    def numbers(self) -> str:
        """For each rule that was on, how many places had which status, and the number of moves; as JSON, to travel with
        the compiled code."""
        counted = Counter((site.rule, str(site.status)) for site in self.sites)
        rules = dict.fromkeys([*(self.rules or ()), *(rule for rule, _ in counted)])
        of_rules = {rule: {status: n for (of, status), n in counted.items() if of == rule} for rule in rules}
        return json.dumps({"rules": of_rules, "moves": len(self.moves)})

    @classmethod
    def from_numbers(cls, graph_id: str, text: str) -> GraphReport:
        """What `numbers` wrote, as the report of a graph from the cache of which no more is known."""
        data = json.loads(text)
        counted: dict[str, dict[str, int]] = data["rules"]
        sites = []
        for rule, numbers in counted.items():
            for status, n in numbers.items():
                reason = "" if status == MatchStatus.FUSED else f"the reason is {NOT_ON_DISK}"
                sites += [Site(rule, MatchStatus(status), reason, LOST_PLACE, "")] * n
        moves = (Move(LOST_PLACE, ""),) * data["moves"]
        return cls(graph_id, tuple(sites), from_cache=True, known=False, rules=tuple(counted), moves=moves)

    def to_json(self) -> str:
        """All of it as JSON, to be kept beside the compiled code."""
        return json.dumps(dataclasses.asdict(self))

    def log(self, log: logging.Logger) -> None:
        """A line for the graph at level INFO, one for each site at DEBUG."""
        for site in self.sites:
            reason = f": {site.reason}" if site.reason else ""
            log.debug("%s %s at %s%s", site.status, site.rule, site.where, reason)
        for move in self.moves:
            log.debug("moved %s at %s", MOVES, move.where)
        if self.sites:
            cached = " (from cache)" if self.from_cache else ""
            log.info("graph %s%s: %d of %d sites fused", self.graph_id, cached, self.fused, len(self.sites))

    @classmethod
    def from_json(cls, text: str) -> GraphReport:
        """Read back what `to_json` wrote, marked as coming from the cache."""
        data: dict[str, Any] = json.loads(text)
        data["sites"] = tuple(Site(**s | {"status": MatchStatus(s["status"])}) for s in data["sites"])
        data["misses"] = tuple(Miss(**m) for m in data["misses"])
        data["moves"] = tuple(Move(**m) for m in data["moves"])
        data["rules"] = None if data["rules"] is None else tuple(data["rules"])
        return cls(**data | {"from_cache": True})


class Report:
    """What the passes did, over all graphs that were compiled with it.

    Graphs appear when they are compiled: at the first call of the compiled model, not at `torch.compile`.
    """

    def __init__(self) -> None:
        self._graphs: list[GraphReport] = []
        self._collect: Callable[[], None] = lambda: None
        self._rules = set(SWITCHES)
        self._expects = False

    def add(self, graph: GraphReport) -> None:
        """Take in what happened to one graph."""
        self._graphs.append(graph)
        self._expects = False

    def expect(self, graph: bool) -> None:
        """Whether Inductor has asked for a graph of which nothing was heard so far."""
        self._expects = graph

    def on_read(self, collect: Callable[[], None]) -> None:
        """Call `collect` before the report is read: graphs that came from the cache may be found late."""
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

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves of all graphs."""
        return tuple(move for graph in self.graphs for move in graph.moves)

    def count(self, status: MatchStatus | str = MatchStatus.FUSED, rule: str | None = None) -> int:
        """Number of sites with this status, of all rules or of one.  Raises ValueError for an unknown one."""
        statuses = {str(known) for known in MatchStatus}
        if status not in statuses:
            hint = f"; for a rule write count(rule={status!r})" if status in self._names() else ""
            raise ValueError(unknown("status", status, statuses) + hint)
        if rule is not None:
            self._check(rule)
        return sum(site.status == status and rule in (None, site.rule) for site in self.sites)

    def declined(self, rule: str) -> Iterator[str]:
        """For each place where this rule was not applied, the sentence why.  Raises ValueError for an unknown rule."""
        self._check(rule)
        lines = []
        for graph in self.graphs:
            mine = [site for site in graph.sites if site.rule == rule]
            left = [site for site in mine if site.status is not MatchStatus.FUSED]
            lines += [f"{site.where}: {site.status}: {site.reason}" for site in left]
            lines += [f"{miss.where}: {miss.what}: {miss.reason}" for miss in graph.misses]
        return iter(lines)

    def why_not(self, rule: str) -> str:
        """Why this rule was applied nowhere, or not everywhere, a line for each place.  Raises ValueError for an
        unknown rule."""
        reasons = list(self.declined(rule))
        graphs = self.graphs
        if not graphs:
            return NOT_TOLD if self._expects else NOTHING_COMPILED
        if all(graph.rules is not None and rule not in (*graph.rules, MOVES) for graph in graphs):
            return "it was switched off in every graph that was compiled: see `level` and its switch in PassConfig"
        if reasons:
            return "\n  ".join(reasons)
        if self.count(rule=rule) or (rule == MOVES and self.moves):
            return "it was applied at every place that it has"
        lost = "" if all(graph.known for graph in graphs) else f" (what nearly was one is {NOT_ON_DISK})"
        return f"no compiled graph has a place for it{lost}"

    def require(self, rule: str) -> None:
        """Raise RequiredFusionError if this rule was applied nowhere, or nothing was compiled, ValueError if there is
        none of this name.  Where what was compiled does not say, that is a warning."""
        if rule not in self._rules:
            raise ValueError(unknown("fusion", rule, self._rules))
        if self.count(rule=rule):
            return
        if self.graphs:
            raise RequiredFusionError(f"{rule} is required and was applied nowhere:\n  {self.why_not(rule)}")
        if not self._expects:
            raise RequiredFusionError(f"{rule} is required, and {NOTHING_COMPILED}")
        log.warning("fusion_passes: %s is required, and it is not known whether it was applied: %s", rule, NOT_TOLD)

    def _names(self) -> set[str]:
        return self._rules | {MOVES} | {site.rule for site in self.sites}

    def _check(self, rule: str) -> None:
        if rule not in (names := self._names()):
            raise ValueError(unknown("fusion", rule, names))

    def __str__(self) -> str:
        graphs = self.graphs
        if not graphs:
            return f"fusion_passes: {NOT_TOLD if self._expects else NOTHING_COMPILED}"
        lines = []
        for number, graph in enumerate(graphs):
            cached = ""
            if graph.from_cache:
                cached = (
                    " (from cache)" if graph.known else " (from cache; places and reasons are not on disk any more)"
                )
            line = f"graph {number}{cached}: {graph.fused} fused, {len(graph.sites)} sites"
            if graph.known:
                total = sum(graph.seconds.values()) * 1e3
                line += f", {graph.nodes_before} -> {graph.nodes_after} nodes, {total:.1f} ms"
            lines.append(line)
            for site in graph.sites:
                lines.append(f"  {site.status:12} {site.rule}  {site.what}")
                lines.append(f"  {'':12} at {site.where}")
                if site.reason:
                    lines.append(f"  {'':12} because {site.reason}")
            for move in graph.moves:
                lines.append(f"  {'moved':12} {MOVES}  {move.what}")
                lines.append(f"  {'':12} at {move.where}")
            for miss in graph.misses:
                lines.append(f"  {'near miss':12} {miss.what}  at {miss.where}")
                lines.append(f"  {'':12} because {miss.reason}")
        return "\n".join(lines)
