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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as of_seed
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from fusion_passes.testing.fuzz import code
from fusion_passes.testing.fuzz.grammar import programs
from fusion_passes.testing.fuzz.graphs import check_graph
from fusion_passes.testing.fuzz.oracle import Fault, NotTraced
from fusion_passes.testing.fuzz.program import Program

RUN = 10
"""Programs of one seed.  With more, hypothesis draws variations of what it has drawn, and half of it is repeated."""
SEEDS = 1_000_003
"""Of hypothesis, for one number."""
TOGETHER = 24
"""Programs that are compiled as one."""


Origin = tuple[Program, int, int]
"""A program, the seed of hypothesis that drew it, and its place in what was drawn by that."""


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
    """Why programs could not be compared: what is traced on a CPU for CUDA stops at ops that look for a device, and
    some programs stock itself cannot compile."""
    findings: list[Finding] = field(default_factory=list)

    def cannot_trace(self, error: NotTraced) -> None:
        """Count a program that could not be compared, by the first line of the reason."""
        self.not_traced[str(error).splitlines()[0][:120]] += 1


def draw(number: int, count: int, strategy: st.SearchStrategy[Program] | None = None) -> list[Program]:
    """`count` different programs, always the same for one number."""
    return [program for program, _, _ in _draw(number, count, strategy)]


def drawn_by(number: int, strategy: st.SearchStrategy[Program] | None = None) -> list[Program]:
    """The programs of one seed of hypothesis, as a finding names them: by its `seed`, and `at`, the place here."""
    drawn: list[Program] = []

    @of_seed(number)
    @_settings(Phase.generate)
    @given(programs() if strategy is None else strategy)
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    return drawn


def _draw(number: int, count: int, strategy: st.SearchStrategy[Program] | None) -> Iterator[Origin]:
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
    """How often each rule was applied to a program that is not changed by it.  Raises Fault, NotTraced."""
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


def run(
    number: int,
    count: int,
    strategy: st.SearchStrategy[Program] | None = None,
    *,
    skip: Collection[tuple[int, int]] = (),
    alone: bool = False,
    tell: Callable[[Sequence[Origin]], None] = lambda origins: None,
) -> Outcome:
    """Draw and check `count` programs.

    skip: (seed, at) of programs that are drawn and not checked.  alone: compile every program that writes by itself.
    tell: is told which programs are checked before they are.
    """
    start = time.perf_counter()
    origins = list(_draw(number, count, strategy))
    outcome = Outcome(programs=len(origins))
    for program, _, _ in origins:
        outcome.features.update(program.features)
    checked = [origin for origin in origins if origin[1:] not in skip]
    faults = [*_check_graphs(checked, outcome, tell), *_check_code(checked, outcome, 1 if alone else TOGETHER, tell)]
    order = {origin[1:]: i for i, origin in enumerate(origins)}
    found = [Finding(program, fault, seed, at) for (program, seed, at), fault in faults]
    outcome.findings = sorted(found, key=lambda finding: order[finding.seed, finding.at])
    outcome.seconds = time.perf_counter() - start
    return outcome


def _check_graphs(
    origins: Sequence[Origin], outcome: Outcome, tell: Callable[[Sequence[Origin]], None]
) -> Iterator[tuple[Origin, Fault]]:
    for origin in origins:
        if origin[0].writes:
            continue
        tell([origin])
        try:
            applied = check(origin[0])
        except Fault as fault:
            yield origin, fault
        except NotTraced as error:
            outcome.cannot_trace(error)
        else:
            outcome.applied.update(applied)
            outcome.fusing += bool(applied)


def _check_code(
    origins: Sequence[Origin], outcome: Outcome, size: int, tell: Callable[[Sequence[Origin]], None]
) -> Iterator[tuple[Origin, Fault]]:
    """size: how many programs are compiled as one."""
    for in_place_writes in (True, False):
        writing = [origin for origin in origins if origin[0].writes and origin[0].in_place_writes is in_place_writes]
        for first in range(0, len(writing), size):
            some = writing[first : first + size]
            tell(some)
            found = code.check_together([program for program, _, _ in some])
            outcome.applied.update(found.applied)
            for error in found.not_traced.values():
                outcome.cannot_trace(error)
            yield from ((some[at], fault) for at, fault in found.faults.items())


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

    @of_seed(finding.seed)
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
