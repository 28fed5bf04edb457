"""The post-grad pass: recognise, fuse, clean.

recognise   idioms are found and described; the graph is untouched
fuse        each rule in order, on the graph that the rules before it have left (compiler/fuse.py)
clean       the nodes that a fusion made dead are erased, and reads come before the writes that follow them; the graph
            is linted; nothing else is touched
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph

from fusion_passes import custom_ops
from fusion_passes.compiler import cache_key, compiled, inductor
from fusion_passes.compiler.config import PassConfig, Profitability, Switch
from fusion_passes.compiler.debug import GraphDump
from fusion_passes.compiler.fuse import Fusing
from fusion_passes.compiler.in_place import reads_before_writes
from fusion_passes.compiler.report import GraphReport, Move, Report, RequiredFusionError
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.fusions.rule import Level, MatchStatus, Rule
from fusion_passes.graph.effects import Effects
from fusion_passes.graph.functional import made_by, op_name
from fusion_passes.graph.read import place
from fusion_passes.idioms import Idioms, recognize

log = logging.getLogger("fusion_passes")
"""TORCH_LOGS="fusion_passes" shows what was fused, "+fusion_passes" every site."""


class PostGradPassManager(inductor.CustomGraphPass):
    """Rewrites a post-grad graph in place as `config` says, and adds what it did to `report`.

    Goes into Inductor's `post_grad_custom_post_pass`; `inductor_options`, `compile` and `enabled` put it there.
    """

    def __init__(self, config: PassConfig, report: Report | None = None, *, judge: bool = True) -> None:
        """judge: raise RequiredFusionError from the first graph that has places for a required fusion and takes none,
        for who has no later moment to look at the whole.  torch wraps it, since it comes out of the compiler."""
        inductor.check_torch()
        _check_arguments(config, report)
        self.judge = judge
        self.config = config
        self.own = Report()
        """The graphs of this manager alone; `report` may be shared by several."""
        self.report = self.own if report is None else report
        self._reports = {self.own, self.report}
        for each in self._reports:
            each.on_read(compiled.collect)
            each.knows(rule.name for rule in config.extra_fusions)
        self.rules: tuple[Rule[Any], ...] = tuple(
            rule for rule in (*config.extra_fusions, *FUSIONS) if config.switch(rule) is not Switch.OFF
        )

    def __deepcopy__(self, memo: object) -> PostGradPassManager:
        """Itself: torch copies options (AOTInductor does), and what is reported must reach who asked."""
        return self

    def uuid(self) -> str | None:
        """Inductor's cache key for this pass; None while debugging, since a graph from the cache is not dumped."""
        if inductor.hook_runs():
            compiled.asking(self)
            for each in self._reports:
                each.expect(True)
        if self.config.debug_dir is not None:
            return None
        # Judged code is kept apart: what another way of compiling has put into the cache was not judged.
        judged = " judged" if self.judge and self.config.required else ""
        return cache_key.key(self.config.key() + judged, self.config.extra_fusions)

    def __call__(self, graph: Graph) -> None:
        """Rewrite `graph`.  A failure of a rule leaves the place as it was, with its reason in the report; only a graph
        that does not pass lint afterwards is an error, since it must not be compiled."""
        compiled.asking(self)
        graph_id = secrets.token_hex(8)
        dump = GraphDump.open(self.config.debug_dir)
        nodes_before = len(graph.nodes)
        seconds: dict[str, float] = {}

        dump.graph("before", graph)
        with _timed(seconds, "recognise"):
            idioms = recognize(graph) if self.rules else Idioms(graph, {})
        dump.idioms(idioms)
        with _timed(seconds, "fuse"):
            effects = Effects(graph, inductor.may_inline)
            fusing = Fusing(graph, effects, measured=self.config.profitability is Profitability.MEASURED)
            fusing.run(self.rules, idioms)
            misses = fusing.misses(self.rules, idioms.near_misses)
        dump.graph("fused", graph)
        with _timed(seconds, "clean"):
            fusing.erase_dead()
            moves = tuple(self._in_place(graph, effects))
            if moves or any(site.status is MatchStatus.FUSED for site in fusing.sites):
                graph.lint()
        dump.graph("after", graph)

        rules = tuple(rule.name for rule in self.rules)
        result = GraphReport(
            graph_id, tuple(fusing.sites), misses, seconds, nodes_before, len(graph.nodes), rules=rules, moves=moves
        )
        dump.report(result)
        compiled.keep(result, on_disk=self.config.debug_dir is None)
        self.take(result)

    def _in_place(self, graph: Graph, effects: Effects) -> Iterator[Move]:
        """Spare Inductor the copies that it makes for the sake of an order that nobody needs."""
        if not self.config.in_place_writes or self.config.level is Level.O0:
            return
        for done in reads_before_writes(graph, effects):
            reads = ", ".join(sorted({op_name(made_by(read)) for read in done.reads}))
            what = f"{op_name(done.write)} in place: {reads} of what was there before comes first"
            yield Move(place(done.write), what)

    def take(self, result: GraphReport) -> None:
        """Report what happened to a graph, now or when it was compiled, and judge it."""
        for each in self._reports:
            each.add(result)
        result.log(log)
        if self.judge:
            self._judge(result)

    def finished(self) -> None:
        """Nothing is left to hear of what Inductor asked for."""
        for each in self._reports:
            each.expect(False)

    def _judge(self, result: GraphReport) -> None:
        """Where a fusion that was asked for by name took no place in this graph: raise if it is required, else warn.

        A graph without a place says nothing: a model can be compiled in pieces.  `Report.require` judges the whole.
        Code from the cache raises nothing, since what was raised for was not cached (see `uuid`).
        """
        for rule in self.rules:
            mine = [site for site in result.sites if site.rule == rule.name]
            reasons = [f"{site.where}: {site.status}: {site.reason}" for site in mine]
            reasons += [f"{miss.where}: {miss.reason}" for miss in result.misses if miss.what == rule.name]
            if not reasons or any(site.status is MatchStatus.FUSED for site in mine):
                continue
            told = "\n  ".join(reasons)
            if self.config.switch(rule) is Switch.REQUIRED and mine:
                raise RequiredFusionError(f"{rule.name} is required and no place in this graph took it:\n  {told}")
            if rule.name in self.config.asked_for:
                log.warning("fusion_passes: %s was asked for and applied nowhere in this graph:\n  %s", rule.name, told)


def _check_arguments(config: object, report: object) -> None:
    if not isinstance(config, PassConfig):
        raise TypeError(f"PostGradPassManager takes a PassConfig, not {config!r}: write PassConfig(...)")
    if not isinstance(report, (Report, type(None))):
        made = "report=fusion_passes.Report()"
        raise TypeError(f"report={report!r}: must be a Report; make one first, keep it, and write {made}")


def _custom_op(name: str, lacks: str) -> bool:
    """What the settings of the compilation that is being traced say about a layer's opaque op: see `custom_ops`."""
    found = [p.config for p in inductor.passes_of_compilation() if isinstance(p, PostGradPassManager)]
    asked = bool(found) and dict(found[-1].custom_ops).get(name, False)
    if asked and lacks:
        log.warning("fusion_passes: custom_ops asks for %s, but %s: it stays plain torch", name, lacks)
    return asked and not lacks


# Not traced but asked, each time that a layer is traced.
custom_ops.set_resolver(torch.compiler.assume_constant_result(_custom_op))


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = time.perf_counter() - start
