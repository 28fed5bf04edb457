"""Stock against fused in generated code, by Inductor's C++ backend: for programs that write.

When a value is read that is written later, the graph does not say: Inductor computes it where it is used.  So only the
generated code shows whether what was read is what was there before.  A compilation takes most of a second, nearly all
of it for one call of the compiler, so many programs are compiled as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion_passes.compiler.config import PassConfig, Profitability
from fusion_passes.compiler.registration import compile as compile_with_passes
from fusion_passes.compiler.report import Report
from fusion_passes.fusions.rule import Level, MatchStatus
from fusion_passes.testing.fuzz.cpp_kernels import compiled_together
from fusion_passes.testing.fuzz.oracle import Fault, check_aliases, check_form, check_near, narrowest, same_bits
from fusion_passes.testing.fuzz.program import Program


def check_code(
    function: Callable[..., Any],
    make_inputs: Callable[[int], tuple[Any, ...]],
    *,
    n: int = 8,
    in_place_writes: bool = True,
) -> Counter[str]:
    """Compare what `function(*make_inputs(n))` returns and writes, compiled with and without the passes.

    Returns how often each rule was applied, and "moved".  Raises Fault.
    """
    both = _Comparison(function, lambda: make_inputs(n), in_place_writes)
    both.check(slice(None), slice(None))
    return both.applied + Counter(moved=both.moved)


def check_program(program: Program) -> Counter[str]:
    """`check_code` of a program."""
    return check_code(program.function, program.make_inputs, n=program.n, in_place_writes=program.in_place_writes)


def check_together(programs: Sequence[Program], *, first_only: bool = False) -> tuple[Counter[str], dict[int, Fault]]:
    """Check many programs with the same settings in one compilation: what was applied, and the faults of programs by
    their place.  A program that differs there is compiled alone; where all of them cannot be compiled as one, half of
    them are.  first_only: one fault is enough.
    """
    if len(programs) == 1:
        try:
            return check_program(programs[0]), {}
        except Fault as fault:
            return Counter(), {0: fault}
    try:
        applied, suspects = _suspects(programs)
    except Exception:
        half = len(programs) // 2
        applied, found = check_together(programs[:half], first_only=first_only)
        if not (found and first_only):
            more, others = check_together(programs[half:], first_only=first_only)
            applied, found = applied + more, found | {at + half: fault for at, fault in others.items()}
        return applied, found
    found = {}
    for at in suspects:
        try:
            check_program(programs[at])
        except Fault as fault:
            found[at] = fault
            if first_only:
                break
    return applied, found


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

    def make_inputs() -> tuple[Any, ...]:
        return tuple(x for program in programs for x in program.make_inputs())

    both = _Comparison(together, make_inputs, programs[0].in_place_writes)
    suspects = []
    outputs = tensors = 0
    for at, program in enumerate(programs):
        written = sum(len(_tensors(x)) for x in program.make_inputs())
        try:
            both.check(slice(outputs, outputs + len(program.results)), slice(tensors, tensors + written))
        except Fault:
            suspects.append(at)
        outputs, tensors = outputs + len(program.results), tensors + written
    return both.applied + Counter(moved=both.moved), suspects


class _Comparison:
    """A function in eager torch, compiled by stock, and with the passes: each sees its own inputs."""

    def __init__(
        self, function: Callable[..., Any], make_inputs: Callable[[], tuple[Any, ...]], in_place_writes: bool
    ) -> None:
        report = Report()
        self.eager = _Run(function, make_inputs())
        self.stock = _compiled(function, make_inputs(), PassConfig(level=Level.O0), Report())
        try:
            config = PassConfig(profitability=Profitability.IGNORE, in_place_writes=in_place_writes)
            self.fused = _compiled(function, make_inputs(), config, report)
        except Exception as error:
            raise Fault("does not run", f"{type(error).__name__}: {error}") from error
        self.applied = Counter(site.rule for site in report.sites if site.status is MatchStatus.FUSED)
        self.moved = report.count(MatchStatus.MOVED)
        for site in report.sites:
            if site.reason.startswith("the rule failed"):
                raise Fault("a rule failed", f"{site.rule}: {site.reason}")
        if len(self.stock.code) != len(self.fused.code):
            raise Fault("another number of graphs", f"{len(self.stock.code)} and {len(self.fused.code)}")
        if not self.applied and not self.moved and self.stock.code != self.fused.code:
            raise Fault("other code", "nothing was fused, and the generated code is another one")

    def check(self, outputs: slice, tensors: slice) -> None:
        """Compare some of the outputs, and of the tensors that were given.  Where nothing was fused the code is the
        same, and stock's own faults (torch 2.11 reads memory that nothing wrote) are not ours."""
        runs = (self.stock, self.fused, self.eager)
        eps = narrowest(run for run in (*self.eager.tensors[tensors], *self.eager.outputs[outputs]))
        results = zip(*(run.outputs[outputs] for run in runs), strict=True)
        given = zip(*(run.tensors[tensors] for run in runs), strict=True)
        named = [(f"result {i}", values) for i, values in enumerate(results)]
        named += [(f"input {i}", values) for i, values in enumerate(given)]
        for name, (x, y, z) in named:
            check_form(name, x, y)
            if not same_bits(x, y):
                if not self.applied and not self.moved:
                    continue
                check_near(name, x, y, z if z.shape == x.shape else x, eps, on_average=False)
        pairs = [(run.outputs[outputs], run.tensors[tensors]) for run in runs[:2]]
        check_aliases((pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]))


class _Run:
    """One call: what it returned, and the tensors that it may have written to, as they are afterwards."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.code: list[str] = []
        self.tensors = [x for given in inputs for x in _tensors(given)]
        with torch.no_grad():
            self.outputs = list(function(*inputs))


def _compiled(function: Callable[..., Any], inputs: tuple[Any, ...], config: PassConfig, report: Report) -> _Run:
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    try:
        no_graph_cache = functorch_config.patch(enable_autograd_cache=False)
        with compiled_together(), no_graph_cache, inductor_config.patch(fx_graph_cache=False):
            run, code = run_and_get_code(lambda: _Run(compile_with_passes(function, config, report=report), inputs))
    finally:
        torch._dynamo.reset()
    run.code = [_without_numbers(text) for text in code]
    return run


def _without_numbers(code: str) -> str:
    """Generated code without what differs from one compilation to the next."""
    code = re.sub(r"# AOT ID: .*", "", code)
    return code.split("def get_args")[0].split("def benchmark_compiled_module")[0]


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, nn.Module):
        return [*given.buffers(), *given.parameters()]
    return [given] if isinstance(given, Tensor) else []
