"""`python -m fusion_passes.testing.fuzz`: many programs on all cores.  A run that was stopped goes on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusion_passes.testing.fuzz import jobs, workers


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 where something was found."""
    arguments = _parser().parse_args(argv)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(-(-arguments.programs // jobs.JOB))
    journal = folder / f"jobs-{arguments.seed}.jsonl"
    done = {record["job"]: record for record in _read(journal) if record["fingerprint"] == jobs.fingerprint()}
    todo = [job for job in numbers if job not in done]
    if len(todo) < len(numbers):
        print(f"{len(numbers) - len(todo)} of {len(numbers)} jobs are done already: {journal}", flush=True)
    start = time.monotonic()
    tasks = [workers.Task(arguments.seed, job, arguments.shrink) for job in todo]
    with journal.open("a") as kept:
        for count, record in enumerate(workers.run_all(tasks, arguments.processes), 1):
            done[record["job"]] = record
            kept.write(json.dumps(record) + "\n")
            kept.flush()
            for finding in record["findings"]:
                _keep(folder, finding)
            _say(count, len(tasks), done, time.monotonic() - start)
    summary = _summary([done[job] for job in numbers], arguments)
    (folder / f"summary-{arguments.seed}.json").write_text(json.dumps(summary, indent=2) + "\n")
    if arguments.record:
        Path(arguments.record).mkdir(parents=True, exist_ok=True)
        (Path(arguments.record) / "fuzz.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{summary['programs']} programs, {len(summary['findings'])} findings: {folder}")
    return 1 if summary["findings"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fusion_passes.testing.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000, help="how many, by default 2000")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other programs")
    parser.add_argument("--out", default=".fuzz", help="folder of the journal and the findings, by default .fuzz")
    parser.add_argument("--record", metavar="DIR", help="write the summary to DIR/fuzz.json too")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="by default as many as there are cores")
    parser.add_argument("--shrink", type=int, default=3, help="findings of a job that are shrunk, by default 3")
    return parser


def _read(journal: Path) -> Iterator[dict[str, Any]]:
    if journal.exists():
        for line in journal.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # the run was stopped while it wrote


def _keep(folder: Path, finding: dict[str, Any]) -> None:
    """A finding's seed in a list, and its test in a file; a crash while drawing has none."""
    with (folder / "seeds.txt").open("a") as file:
        file.write(f"{finding['seed']} {finding['at']} {finding['kind']}\n")
    if finding["test"]:
        test = f"test_{finding['seed']}_{finding['at']}.py"
        (folder / test).write_text(f'"""{finding["text"]}"""\n\n{finding["test"]}')


def _say(count: int, pending: int, done: dict[int, dict[str, Any]], seconds: float) -> None:
    """One line about where the run is."""
    programs = sum(record["programs"] for record in done.values())
    findings = sum(len(record["findings"]) for record in done.values())
    left = seconds / count * (pending - count)
    rate = count * jobs.JOB / seconds * 60
    line = f"{programs} programs, {findings} findings, {rate:.0f} a minute, {left / 60:.0f} minutes left"
    print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)


def _summary(records: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    total = {name: Counter[str]() for name in ("applied", "features", "not_traced")}
    for record in records:
        for name, counter in total.items():
            counter.update(record[name])
    findings = [finding for record in records for finding in record["findings"]]
    return {
        "programs": sum(record["programs"] for record in records),
        "seed": arguments.seed,
        "core_seconds": round(sum(record["seconds"] for record in records)),
        "processes": arguments.processes,
        "fusing": sum(record["fusing"] for record in records),
        "not_traced": dict(total["not_traced"].most_common()),
        "applied": dict(total["applied"].most_common()),
        "findings": [{key: finding[key] for key in ("kind", "text", "seed", "at")} for finding in findings],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "features": dict(sorted(total["features"].items())),
    }


if __name__ == "__main__":
    sys.exit(main())
