"""One job of a long run, in a process of its own: programs are drawn, checked, and what is found is shrunk."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import warnings
from collections import Counter
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


def run(seed: int, job: int, shrink: int) -> dict[str, Any]:
    """Draw and check the programs of one job."""
    from fusion_passes.testing.fuzz import campaign

    number = seed * 1_000_003 + job
    outcome = campaign.run(number, JOB)
    findings = []
    kinds = Counter[str]()
    for finding in outcome.findings:
        kinds[finding.fault.kind] += 1
        short = campaign.shrink(finding) if kinds[finding.fault.kind] <= shrink else finding
        findings.append(
            {
                "kind": finding.fault.kind,
                "text": str(short.fault),
                "seed": finding.seed,
                "at": finding.at,
                "test": short.program.test(f"test_{finding.seed}_{finding.at}"),
            }
        )
    return {
        "job": job,
        "fingerprint": fingerprint(),
        "programs": outcome.programs,
        "seconds": round(outcome.seconds, 1),
        "fusing": outcome.fusing,
        "applied": dict(outcome.applied),
        "features": dict(outcome.features),
        "not_traced": sum(outcome.not_traced.values()),
        "findings": findings,
    }


@functools.cache
def fingerprint() -> str:
    """Of the package and torch: a job of other code is done again."""
    import torch

    package = Path(__file__).parents[2]
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
