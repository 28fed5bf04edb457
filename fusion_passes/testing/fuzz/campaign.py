"""Drawing programs by a seed, checking them, and shrinking what was found.

Hypothesis draws the same programs for the same seed, as long as none of them fails.  So programs are drawn first and
checked together, which for generated code is many times as fast; then the same draw is repeated with the one that
failed made to fail, and hypothesis shrinks it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from fusion_passes.testing.fuzz import code
from fusion_passes.testing.fuzz.grammar import programs
from fusion_passes.testing.fuzz.graphs import NotTraced, check_graph
from fusion_passes.testing.fuzz.oracle import Fault
from fusion_passes.testing.fuzz.program import Program

RUN = 10
"""Programs of one seed.  With more, hypothesis draws variations of what it has drawn, and half of it is repeated."""
SEEDS = 1_000_003
"""Of hypothesis, for one number."""
TOGETHER = 24
"""Programs that are compiled as one."""


@dataclass(frozen=True)
class Finding:
    """A program that a fusion changes.  seed, at: where it was drawn."""

    program: Program
    fault: Fault
    seed: int
    at: int


@dataclass
class Outcome:
    """Of a run: how many programs, how often each rule was applied, what the grammar chose, what was found."""

    programs: int = 0
    seconds: float = 0.0
    applied: Counter[str] = field(default_factory=Counter)
    fusing: int = 0
    features: Counter[str] = field(default_factory=Counter)
    not_traced: Counter[str] = field(default_factory=Counter)
    """Why programs could not be traced: what is traced on a CPU for CUDA stops at ops that look for a device."""
    findings: list[Finding] = field(default_factory=list)


def draw(number: int, count: int, strategy: st.SearchStrategy[Program] | None = None) -> list[Program]:
    """`count` different programs, always the same for one number."""
    return [program for program, _, _ in _draw(number, count, strategy)]


def drawn_by(number: int, strategy: st.SearchStrategy[Program] | None = None) -> list[Program]:
    """The programs of one seed of hypothesis, as a finding names them: by its `seed`, and `at`, the place here."""
    drawn: list[Program] = []

    @seed(number)
    @_settings(Phase.generate)
    @given(programs() if strategy is None else strategy)
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    return drawn


def _draw(number: int, count: int, strategy: st.SearchStrategy[Program] | None) -> Iterator[tuple[Program, int, int]]:
    """(program, seed, at) each."""
    seen: set[tuple[object, ...]] = set()
    for run in itertools.count():
        for at, program in enumerate(drawn_by(number * SEEDS + run, strategy)):
            key = (program.source, program.inputs, program.backend, program.n, program.in_place_writes)
            if len(seen) == count:
                return
            if key not in seen:
                seen.add(key)
                yield program, number * SEEDS + run, at


def check(program: Program) -> Counter[str]:
    """How often each rule was applied to a program that is not changed by it.  Raises Fault."""
    if program.writes:
        return code.check_program(program)
    return check_graph(
        program.function,
        program.make_inputs,
        backend=program.backend,
        n=program.n,
        dynamic=program.dynamic,
        in_place_writes=program.in_place_writes,
    )


def run(number: int, count: int, strategy: st.SearchStrategy[Program] | None = None) -> Outcome:
    """Draw and check `count` programs."""
    start = time.perf_counter()
    origins = list(_draw(number, count, strategy))
    drawn = [program for program, _, _ in origins]
    outcome = Outcome(programs=len(drawn))
    for program in drawn:
        outcome.features.update(program.features)
    faults: list[tuple[int, Fault]] = []
    for at, program in enumerate(drawn):
        if not program.writes:
            try:
                applied = check(program)
            except Fault as fault:
                faults.append((at, fault))
                continue
            except NotTraced as error:
                outcome.not_traced[str(error)[:80]] += 1
                continue
            outcome.applied.update(applied)
            outcome.fusing += bool(applied)
    for in_place_writes in (True, False):
        writing = [i for i, p in enumerate(drawn) if p.writes and p.in_place_writes is in_place_writes]
        for first in range(0, len(writing), TOGETHER):
            some = writing[first : first + TOGETHER]
            applied, found = code.check_together([drawn[i] for i in some])
            outcome.applied.update(applied)
            faults += [(some[i], fault) for i, fault in found.items()]
    for index, shown in sorted(faults, key=lambda found: found[0]):
        program, of_program, at = origins[index]
        outcome.findings.append(Finding(program, shown, of_program, at))
    outcome.seconds = time.perf_counter() - start
    return outcome


def shrink(
    finding: Finding,
    strategy: st.SearchStrategy[Program] | None = None,
    *,
    limit: int = 400,
    checked: Callable[[Program], object] = check,
) -> Finding:
    """A short program with a fault of the same kind.  strategy: that which drew it.  limit: of programs that are
    tried."""
    tried: dict[Program, Fault | None] = {}
    best = [finding]

    def fault_of(program: Program) -> Fault | None:
        if program == finding.program:
            return finding.fault
        if program not in tried:
            if len(tried) >= limit:
                return None
            tried[program] = None
            try:
                checked(program)
            except NotTraced:
                pass
            except Fault as fault:
                tried[program] = fault if fault.kind == finding.fault.kind else None
        return tried[program]

    seen = [0]

    @seed(finding.seed)
    @_settings(Phase.generate, Phase.shrink)
    @given(programs() if strategy is None else strategy)
    def fails(program: Program) -> None:
        if seen[0] < finding.at + 1:
            seen[0] += 1
            if seen[0] <= finding.at and program != finding.program:
                return
        fault = fault_of(program)
        if fault is not None:
            if len(str(program)) <= len(str(best[0].program)):
                best[0] = Finding(program, fault, finding.seed, finding.at)
            raise fault

    with contextlib.suppress(Fault, HypothesisException):
        fails()
    return best[0]


def _settings(*phases: Phase) -> settings:
    return settings(
        max_examples=RUN,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
