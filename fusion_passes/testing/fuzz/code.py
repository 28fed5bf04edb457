"""Stock against fused in generated code, by Inductor's C++ backend: for programs that write.

When a value is read that is written later, the graph does not say: Inductor computes it where it is used.  So only the
generated code shows whether what was read is what was there before.  A compilation takes most of a second, nearly all
of it for one call of the compiler, so many programs are compiled as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fusion_passes.compiler.config import PassConfig, Profitability
from fusion_passes.compiler.registration import compile as compile_with_passes
from fusion_passes.compiler.report import Report
from fusion_passes.fusions.rule import Level, MatchStatus
from fusion_passes.testing.fuzz.cpp_kernels import compiled_together
from fusion_passes.testing.fuzz.ideal import InFP32
from fusion_passes.testing.fuzz.oracle import (
    Fault,
    Near,
    NotTraced,
    check_aliases,
    check_all_near,
    check_form,
    check_near,
    narrowest,
    same_bits,
)
from fusion_passes.testing.fuzz.program import Program


def check_code(
    function: Callable[..., Any],
    make_inputs: Callable[[int, int], tuple[Any, ...]],
    *,
    n: int = 8,
    in_place_writes: bool = True,
) -> Counter[str]:
    """Compare what `function(*make_inputs(n, seed))` returns and writes, compiled with and without the passes.

    make_inputs: other seeds than 0 are asked for where a result seems too far from fp32; see `oracle`.
    Returns how often each rule was applied, and "moved".  Raises Fault, and NotTraced where stock alone raises.
    """
    applied: list[Counter[str]] = []

    def results(seeds: Sequence[int]) -> list[list[Near]]:
        both = _Comparison(function, lambda seed: make_inputs(n, seed), in_place_writes, seeds)
        applied.append(both.applied + Counter(moved=both.moved))
        return [list(both.near(at, slice(None), slice(None), equal_too=len(seeds) > 1)) for at in range(len(seeds))]

    check_all_near(results)
    return applied[0]


def check_program(program: Program) -> Counter[str]:
    """`check_code` of a program."""
    return check_code(program.function, program.make_inputs, n=program.n, in_place_writes=program.in_place_writes)


@dataclass
class Together:
    """What came of many programs: how often each rule was applied, and by their places the faults, and why a program
    could not be compared."""

    applied: Counter[str] = field(default_factory=Counter)
    faults: dict[int, Fault] = field(default_factory=dict)
    not_traced: dict[int, NotTraced] = field(default_factory=dict)

    def check_alone(self, at: int, program: Program) -> Counter[str]:
        """`check_program` of the program at a place, which keeps what it raises."""
        try:
            return check_program(program)
        except Fault as fault:
            self.faults[at] = fault
        except NotTraced as error:
            self.not_traced[at] = error
        return Counter()

    def add(self, other: Together, first: int) -> None:
        """Add what came of others, the first of which is at this place."""
        self.applied += other.applied
        self.faults |= {at + first: fault for at, fault in other.faults.items()}
        self.not_traced |= {at + first: error for at, error in other.not_traced.items()}


def check_together(programs: Sequence[Program], *, first_only: bool = False) -> Together:
    """Check many programs with the same settings in one compilation.  A program that differs there is compiled alone;
    where all of them cannot be compiled as one, half of them are.  first_only: one fault is enough.
    """
    found = Together()
    if len(programs) == 1:
        found.applied = found.check_alone(0, programs[0])
        return found
    try:
        found.applied, suspects = _suspects(programs)
    except Exception:
        half = len(programs) // 2
        for first, some in ((0, programs[:half]), (half, programs[half:])):
            if not (found.faults and first_only):
                found.add(check_together(some, first_only=first_only), first)
        return found
    for at in suspects:
        found.check_alone(at, programs[at])
        if found.faults and first_only:
            break
    return found


def _suspects(programs: Sequence[Program]) -> tuple[Counter[str], list[int]]:
    """What was applied in all of them as one function, and which of them differ there."""
    functions = [program.function for program in programs]
    inputs = [len(program.inputs) for program in programs]

    def together(*given: Any) -> tuple[Any, ...]:
        outputs: list[Any] = []
        start = 0
        for function, count in zip(functions, inputs, strict=True):
            outputs.extend(function(*given[start : start + count]))
            start += count
        return tuple(outputs)

    def make_inputs(seed: int) -> tuple[Any, ...]:
        return tuple(x for program in programs for x in program.make_inputs(seed=seed))

    both = _Comparison(together, make_inputs, programs[0].in_place_writes)
    suspects = []
    outputs = tensors = 0
    for at, program in enumerate(programs):
        written = sum(len(_tensors(x)) for x in program.make_inputs())
        try:
            for near in both.near(0, slice(outputs, outputs + len(program.results)), slice(tensors, tensors + written)):
                check_near(near.name, near.stock, near.fused, near.ideal, near.eps)
        except Fault:
            suspects.append(at)
        outputs, tensors = outputs + len(program.results), tensors + written
    return both.applied + Counter(moved=both.moved), suspects


class _Comparison:
    """A function compiled by stock and with the passes, called with the inputs of some seeds."""

    def __init__(
        self,
        function: Callable[..., Any],
        make_inputs: Callable[[int], tuple[Any, ...]],
        in_place_writes: bool,
        seeds: Sequence[int] = (0,),
    ) -> None:
        self._function, self._make_inputs, self._seeds = function, make_inputs, seeds
        self._ideal: dict[int, _Run] = {}
        report = Report()
        try:
            self.stock, stock_code = self._compiled(PassConfig(level=Level.O0), Report())
        except Exception as error:
            raise NotTraced(f"stock: {type(error).__name__}: {error}") from error
        try:
            config = PassConfig(profitability=Profitability.IGNORE, in_place_writes=in_place_writes)
            self.fused, fused_code = self._compiled(config, report)
        except Exception as error:
            raise Fault("does not run", f"{type(error).__name__}: {error}") from error
        self.applied = Counter(site.rule for site in report.sites if site.status is MatchStatus.FUSED)
        self.moved = len(report.moves)
        for site in report.sites:
            if site.reason.startswith("the rule failed"):
                raise Fault("a rule failed", f"{site.rule}: {site.reason}")
        if len(stock_code) != len(fused_code):
            raise Fault("another number of graphs", f"{len(stock_code)} and {len(fused_code)}")
        if not self.applied and not self.moved and stock_code != fused_code:
            raise Fault("other code", "nothing was fused, and the generated code is another one")

    def _compiled(self, config: PassConfig, report: Report) -> tuple[list[_Run], list[str]]:
        """What it does with the inputs of each seed, and its code."""
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config
        from torch._inductor.utils import run_and_get_code

        def run() -> list[_Run]:
            compiled = compile_with_passes(self._function, config, report=report)
            return [_Run(compiled, self._make_inputs(seed)) for seed in self._seeds]

        torch._dynamo.reset()
        try:
            no_graph_cache = functorch_config.patch(enable_autograd_cache=False)
            with compiled_together(), no_graph_cache, inductor_config.patch(fx_graph_cache=False):
                runs, code = run_and_get_code(run)
        finally:
            torch._dynamo.reset()
        return runs, [_without_numbers(text) for text in code]

    def near(self, at: int, outputs: slice, tensors: slice, *, equal_too: bool = False) -> Iterator[Near]:
        """Compare some of the outputs, and of the tensors that were given, of the `at`-th seed: raises where what must
        be equal is not.  The results that are not equal bit for bit; equal_too: all results.

        Where nothing was fused the code is the same, and stock's own faults (torch 2.11 reads memory that nothing
        wrote) are not ours."""
        stock, fused = self.stock[at], self.fused[at]
        eps = narrowest((*stock.tensors[tensors], *stock.outputs[outputs]))
        for kind, part in (("outputs", outputs), ("tensors", tensors)):
            for i, (x, y) in enumerate(zip(getattr(stock, kind)[part], getattr(fused, kind)[part], strict=True)):
                name = f"{'result' if kind == 'outputs' else 'input'} {i}"
                check_form(name, x, y)
                if equal_too or ((self.applied or self.moved) and not same_bits(x, y)):
                    yield Near(name, x, y, getattr(self._ideally(at), kind)[part][i], eps)
        check_aliases(
            (stock.outputs[outputs], fused.outputs[outputs]), (stock.tensors[tensors], fused.tensors[tensors])
        )

    def _ideally(self, at: int) -> _Run:
        if at not in self._ideal:
            inputs = self._make_inputs(self._seeds[at])
            with InFP32() as mode:
                run = _Run(self._function, inputs)
                run.outputs, run.tensors = [[mode.of(x) for x in of] for of in (run.outputs, run.tensors)]
            self._ideal[at] = run
        return self._ideal[at]


class _Run:
    """One call: what it returned, and the tensors that it may have written to, as they are afterwards."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.tensors = [x for given in inputs for x in _tensors(given)]
        with torch.no_grad():
            self.outputs = list(function(*inputs))


def _without_numbers(code: str) -> str:
    """Generated code without what differs from one compilation to the next."""
    code = re.sub(r"# AOT ID: .*", "", code)
    return code.split("def get_args")[0].split("def benchmark_compiled_module")[0]


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, nn.Module):
        return [*given.buffers(), *given.parameters()]
    return [given] if isinstance(given, Tensor) else []
