"""A differential fuzzer of the passes: programs from a grammar, stock against every fusion forced.

    python -m fusion_passes.testing.fuzz --programs 2000 --seed 1

`programs()` draws a `Program`; `check_graph` compares its post-grad graph with the rewritten one, `check_code` what
Inductor generates of both.  docs/fuzzing.md says how to read a finding.
"""

try:
    import hypothesis as hypothesis
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fusion_passes.testing.fuzz draws its programs with hypothesis: pip install 'fusion_passes[test]'",
        name=error.name,
    ) from error

from fusion_passes.testing.fuzz.campaign import Finding, check, draw, shrink
from fusion_passes.testing.fuzz.code import check_code
from fusion_passes.testing.fuzz.grammar import programs, pure_programs, writing_programs
from fusion_passes.testing.fuzz.graphs import check_graph
from fusion_passes.testing.fuzz.oracle import Fault
from fusion_passes.testing.fuzz.program import Program

__all__ = [
    "Fault",
    "Finding",
    "Program",
    "check",
    "check_code",
    "check_graph",
    "draw",
    "programs",
    "pure_programs",
    "shrink",
    "writing_programs",
]
