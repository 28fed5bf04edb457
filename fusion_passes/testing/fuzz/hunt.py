"""How many programs it takes until the fuzzer finds a planted bug."""

from __future__ import annotations

from fusion_passes.testing.fuzz import campaign, code
from fusion_passes.testing.fuzz.grammar import pure_programs, writing_programs
from fusion_passes.testing.fuzz.graphs import Traced
from fusion_passes.testing.fuzz.mutants import Mutant
from fusion_passes.testing.fuzz.oracle import Fault, NotTraced
from fusion_passes.testing.fuzz.program import Program

COMPILED = 480
"""Programs that are compiled for one planted bug, at most."""


class Drawn:
    """Programs of one seed.  Stock's graph of each is made once, for all mutants."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._programs: dict[bool, list[Program]] = {}
        self._traced: dict[int, Traced | None] = {}

    def until_found(self, mutant: Mutant, limit: int) -> int | None:
        """How many programs it takes until one shows the mutant, None where none of `limit` does.

        Only a program counts that is right without the bug."""
        if mutant.writes:
            return self._until_compiled(mutant, limit)
        for at in range(limit):
            traced = self._graph(at, limit)
            if traced is None:
                continue
            try:
                with mutant.planted():
                    traced.check()
            except Fault:
                traced.check()
                return at + 1
        return None

    def _until_compiled(self, mutant: Mutant, limit: int) -> int | None:
        programs = [program for program in self._drawn(True, min(limit, COMPILED)) if program.in_place_writes]
        for first in range(0, len(programs), campaign.TOGETHER):
            some = programs[first : first + campaign.TOGETHER]
            with mutant.planted():
                found = code.check_together(some, first_only=True).faults
            if found:
                at = min(found)
                code.check_program(some[at])
                return first + at + 1
        return None

    def _graph(self, at: int, limit: int) -> Traced | None:
        if at not in self._traced:
            program = self._drawn(False, limit)[at]
            options = {"backend": program.backend, "n": program.n, "dynamic": program.dynamic}
            try:
                self._traced[at] = Traced.of(program.function, program.make_inputs, **options)  # type: ignore[arg-type]
            except NotTraced:
                self._traced[at] = None
        return self._traced[at]

    def _drawn(self, writing: bool, limit: int) -> list[Program]:
        if len(self._programs.get(writing, ())) < limit:
            strategy = writing_programs() if writing else pure_programs()
            self._programs[writing] = campaign.draw(self.seed, limit, strategy)
            self._traced.clear()
        return self._programs[writing]
