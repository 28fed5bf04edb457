"""Run the GPU tests of the kernels and ops under compute-sanitizer's memcheck: no access outside of any tensor.

    python tests/sanitize.py --record benchmarks/results

Every tensor is an allocation of its own (no caching allocator) with padding around it, so that a step over its end is
seen. The tests run in several processes at once, each with a share of them; what the time does not allow for is
recorded as not run. It ends with 1 where memcheck found something, or did not run, a test failed, or one was not run.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ("tests/kernels", "tests/ops", "tests/nn")
# CUDA graphs need the caching allocator; torch.compile adds kernels that are not ours, and takes most of the time;
# several caches of 2**31 elements at once are more than a card holds.
LEFT_OUT = (
    "not graph and not capture and not waits_for and not read_in_each_call and not compiled and not modes "
    "and not flex and not elements and not far_apart"
)
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
OPTIONS = ("--tool", "memcheck", "--padding", "256", "--report-api-errors", "no", "--print-limit", "20")
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def outcomes(log: str) -> Counter[str]:
    """How many tests ended how, from pytest's -v output, complete or cut off."""
    found = re.findall(rf"^\S*::.* ({'|'.join(OUTCOMES)})\b", log, re.MULTILINE)
    return Counter(word.lower() for word in found)


def failures(log: str) -> dict[str, str]:
    """Which tests failed, and why as far as pytest came to say so."""
    failed = re.findall(r"^(\S+::.*) (?:FAILED|ERROR)(?: +\[ *\d+%\])?$", log, re.MULTILINE)
    why = dict.fromkeys(failed, "")
    for line in re.findall(r"^(?:FAILED|ERROR) (\S+::.*)$", log, re.MULTILINE):
        # A test's parameters may have a " - " too: the longest of the names that fit is the test.
        if names := [test for test in why if line.startswith(f"{test} - ")]:
            test = max(names, key=len)
            why[test] = line.removeprefix(f"{test} - ")
    return why


def errors(log: str) -> int | None:
    """The errors that memcheck counted; of a run that was cut off, those that it had reported. None: it did not run."""
    if summary := re.findall(r"ERROR SUMMARY: (\d+) error", log):
        return sum(map(int, summary))
    return len(re.findall(r"^=+ Invalid|^=+ Misaligned", log, re.MULTILINE)) if "COMPUTE-SANITIZER" in log else None


def collect(tests: Sequence[str], keep: str) -> list[str]:
    """The ids of the GPU tests."""
    command = [sys.executable, "-m", "pytest", *tests, "-m", "gpu and not slow", "-k", keep, "--collect-only", "-q"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def spread(tests: Sequence[str], each: int) -> list[str]:
    """Of a test with many parameters so many ids, evenly spread."""
    cases: dict[str, list[str]] = {}
    for test in tests:
        cases.setdefault(test.split("[")[0], []).append(test)
    return [ids[i] for ids in cases.values() for i in sorted({k * len(ids) // each for k in range(each)})]


def run(sanitizer: str, tests: Sequence[str], processes: int, seconds: float) -> dict[str, Any]:
    """Of so many processes, each with a share of the tests and so much time: outcomes and what memcheck found."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    pytest = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:xdist", "-p", "no:cacheprovider"]
    counts: Counter[str] = Counter()
    found: list[int | None] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{i}.log" for i in range(processes)]
        running = []
        for i, log in enumerate(logs):
            command = [sanitizer, *OPTIONS, *pytest, *tests[i::processes]]
            with log.open("w") as out:
                running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out))
        end = time.monotonic() + seconds
        for process, log in zip(running, logs, strict=True):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
            text = log.read_text()
            counts += outcomes(text)
            found.append(errors(text))
            failed |= failures(text)
            if found[-1] != 0 or failures(text):
                print(*re.findall(r"^(?:=+ |E  |FAILED|ERROR).*", text, re.MULTILINE)[:60], sep="\n")
    return {
        "tests": dict(sorted(counts.items())) | {"not_run": len(tests) - counts.total()},
        "failures": failed,
        "memory_errors": None if None in found else sum(x for x in found if x is not None),
    }


def is_clean(result: dict[str, Any]) -> bool:
    """Whether all tests ran, passed, and stayed inside of their tensors; says so where some did not run."""
    if not_run := result["tests"]["not_run"]:
        print(f"{not_run} of the tests did not run: give them more --minutes, or run fewer of --each", file=sys.stderr)
    return not not_run and result["memory_errors"] == 0 and not result["failures"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders")
    parser.add_argument("--keep", default=LEFT_OUT, help="pytest's -k")
    parser.add_argument("--each", type=int, default=6, help="of the parameters of one test")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--record", type=Path, metavar="DIR", help="write DIR/sanitizer-<card>.json")
    arguments = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))
    if sanitizer is None:
        parser.error("no compute-sanitizer here: it comes with the CUDA toolkit")
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    tests = spread(collect(arguments.tests, arguments.keep), arguments.each)
    start = time.monotonic()
    result = run(sanitizer, tests, arguments.processes, arguments.minutes * 60)

    import torch
    import triton

    card = torch.cuda.get_device_name()
    record = {
        "card": card,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "sanitizer": version.strip().splitlines()[-1],
        "options": " ".join(OPTIONS),
        "selected": f"{' '.join(arguments.tests)} -m 'gpu and not slow' -k '{arguments.keep}'",
        "cases_of_each_test": arguments.each,
        "seconds": round(time.monotonic() - start),
        **result,
    }
    print(json.dumps(record, indent=2))
    if arguments.record is not None:
        arguments.record.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
        (arguments.record / f"sanitizer-{slug}.json").write_text(json.dumps(record, indent=2) + "\n")
    return int(not is_clean(result))


if __name__ == "__main__":
    sys.exit(main())
