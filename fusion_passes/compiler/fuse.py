"""Fuse: each rule in order, on one graph, as the rules before it have left it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Graph, Node

from fusion_passes.compiler.report import Miss, Site
from fusion_passes.fusions.rule import MatchStatus, Rule
from fusion_passes.graph.effects import Effects
from fusion_passes.graph.match import DeclinedError, Match
from fusion_passes.graph.read import place
from fusion_passes.graph.rewrite import (
    Insertion,
    ask_inputs,
    check_order,
    check_readers,
    early_readers,
    erase_dead,
    move_behind,
    replacements,
    sizes_of_inputs,
)
from fusion_passes.idioms import Idioms, NearMiss

log = logging.getLogger("fusion_passes")


class Fusing:
    """What the rules do to one graph.  Only a rule that applies edits it; one that fails leaves it as it was.

    sites: every place that a rule's pattern found, and what became of it.
    """

    def __init__(self, graph: Graph, effects: Effects, *, measured: bool) -> None:
        """measured: ask rules whether they are profitable."""
        self.sites: list[Site] = []
        self._graph = graph
        self._effects = effects
        self._measured = measured
        self._places: set[Node] = set()
        self._taken: set[Node] = set()
        self._replaced: dict[Node, Node] = {}
        self._near_misses: list[NearMiss] = []

    def run(self, rules: Iterable[Rule[Any]], idioms: Idioms) -> None:
        """Try every rule.  Idioms are read again behind one that applied, of the kinds that the next rules ask for:
        what it has made may be another rule's place."""
        for rule in rules:
            if self._taken:
                self.erase_dead()
                idioms = idioms.unread()
            matches = list(self._matches(rule, idioms))
            self._near_misses += self._explained(rule, idioms)  # before the graph changes
            for m in matches:
                if not m.nodes & self._taken:
                    self._try(rule, m)

    def erase_dead(self) -> None:
        """Erase what the rule that ran last took the place of."""
        erase_dead(self._taken)
        self._taken, self._replaced = set(), {}

    def misses(self, rules: Iterable[Rule[Any]], near_misses: Iterable[NearMiss]) -> tuple[Miss, ...]:
        """What nearly was a place, by the rules and, where a rule found none in this graph, by the idioms.

        near_misses: of idioms."""
        misses = [miss for miss in self._near_misses if miss.node not in self._places]
        superseded = {miss.supersedes for miss in misses}
        idle = {rule.name for rule in rules} - {site.rule for site in self.sites}
        anchors = {rule.anchor for rule in rules}
        misses += (m for m in near_misses if m.node not in superseded and (idle or m.what in anchors))
        return tuple(Miss(miss.what, miss.reason, place(miss.node)) for miss in misses)

    def _matches(self, rule: Rule[Any], idioms: Idioms) -> Iterable[Match]:
        try:
            return list(rule.pattern(idioms))
        except Exception as error:
            self.sites.append(Site(rule.name, MatchStatus.ILLEGAL, _sentence(error), "the whole graph", ""))
            return ()

    def _explained(self, rule: Rule[Any], idioms: Idioms) -> Iterator[NearMiss]:
        try:
            yield from rule.explain(idioms)
        except Exception as error:
            log.warning("%s cannot explain itself: %s", rule.name, _sentence(error))

    def _try(self, rule: Rule[Any], m: Match) -> None:
        self._places |= m.nodes
        where, what = place(m.site), _text(rule, m)
        status, reason = self._apply(rule, m)
        self.sites.append(Site(rule.name, status, reason, where, what))
        if status is MatchStatus.FUSED:
            self._taken |= m.nodes

    def _apply(self, rule: Rule[Any], m: Match) -> tuple[MatchStatus, str]:
        """Decide about one match and rewrite it.  Whatever goes wrong, the graph is as before."""
        status = MatchStatus.ILLEGAL
        insertion = Insertion(self._graph, m.outputs, self._replaced)
        try:
            rule.legality(m)  # first: its sentences say more
            check_readers(m)
            if self._measured:
                status = MatchStatus.UNPROFITABLE
                rule.profitability(m)
                status = MatchStatus.ILLEGAL
            sizes = sizes_of_inputs(m, self._replaced)
            new = replacements(m, rule.replacement(m, insertion.call))
            check_order(m, new, insertion, self._effects)
        except Exception as error:
            insertion.undo()
            return status, _sentence(error)
        ask_inputs(sizes)
        move_behind(m, early_readers(m))
        for output, result in new.items():
            output.replace_all_uses_with(result)
        self._replaced.update(new)
        self._effects.replaced(m.nodes, insertion.nodes, new.values())
        return MatchStatus.FUSED, ""


def _text(rule: Rule[Any], m: Match) -> str:
    try:
        return rule.describe(m)
    except Exception as error:
        return _sentence(error)


def _sentence(error: Exception) -> str:
    """The reason for a report: a condition's own sentence, or an unexpected error with its type."""
    if isinstance(error, DeclinedError):
        return str(error)
    log.warning("a rule failed; the graph is as it was", exc_info=error)
    return f"the rule failed: {type(error).__name__}: {error}"
