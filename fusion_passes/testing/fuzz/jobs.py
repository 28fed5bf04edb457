"""One job of a long run, in a process of its own: programs are drawn, checked, and what is found is shrunk."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

JOB = 200
"""Programs of one job: what a run that was stopped loses at most, for each process."""


def start() -> None:
    """Of a process: one thread, no cache, no warnings about what is declined."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


@dataclass(frozen=True)
class Named:
    """A program by the place where it was drawn, and as a test."""

    seed: int
    at: int
    test: str


@dataclass(frozen=True)
class Doing:
    """What a job does with which programs: "drawing" some, "checking" or "shrinking" these."""

    what: str
    programs: tuple[Named, ...] = ()


def run(
    seed: int,
    job: int,
    shrink: int,
    *,
    skip: Collection[tuple[int, int]] = (),
    alone: bool = False,
    tell: Callable[[Doing], None] = lambda doing: None,
) -> dict[str, Any]:
    """Draw and check the programs of one job.

    shrink: how many findings of each kind are shrunk.  skip, alone: see `campaign.run`.  tell: is told what is done
    before it is done.
    """
    from fusion_passes.testing.fuzz import campaign
    from fusion_passes.testing.fuzz.program import Program

    def named(program: Program, of_seed: int, at: int) -> Named:
        return Named(of_seed, at, program.test(f"test_{of_seed}_{at}"))

    tell(Doing("drawing"))
    number = seed * 1_000_003 + job
    outcome = campaign.run(
        number,
        JOB,
        skip=skip,
        alone=alone,
        tell=lambda origins: tell(Doing("checking", tuple(named(*origin) for origin in origins))),
    )
    findings = []
    kinds = Counter[str]()
    for finding in outcome.findings:
        kinds[finding.fault.kind] += 1
        short = finding
        if kinds[finding.fault.kind] <= shrink:
            tell(Doing("shrinking", (named(finding.program, finding.seed, finding.at),)))
            short = campaign.shrink(finding)
        place = named(short.program, finding.seed, finding.at)
        findings.append({"kind": finding.fault.kind, "text": str(short.fault), **asdict(place)})
    return record(
        job,
        programs=outcome.programs,
        seconds=round(outcome.seconds, 1),
        fusing=outcome.fusing,
        applied=dict(outcome.applied),
        features=dict(outcome.features),
        not_traced=dict(outcome.not_traced),
        findings=findings,
    )


def record(job: int, **known: Any) -> dict[str, Any]:
    """A job's line in the journal; what is not known is nothing."""
    nothing = {"programs": 0, "seconds": 0.0, "fusing": 0, "applied": {}, "features": {}, "not_traced": {}}
    return {"job": job, "fingerprint": fingerprint(), **nothing, "findings": [], **known}


@functools.cache
def fingerprint() -> str:
    """Of the package and torch: a job of other code is done again."""
    import torch

    package = Path(__file__).parents[2]
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
