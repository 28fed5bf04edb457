"""Set up every test process, and record GPU runs (`--record DIR`)."""

import datetime
import gc
import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

# Inductor reads these when it is imported. A graph served from a cache skips the passes, so a test that does not ask
# for a cache must not meet one; and a pool of compile workers per test process only costs time on a small machine.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when it is imported (by Inductor, if nobody was earlier): tests/kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="DIR", help="write DIR/test-gpu-<card>.json; needs a CUDA card")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        if not torch.cuda.is_available():
            raise pytest.UsageError("--record: no CUDA card here, so there is nothing to record")
        config.pluginmanager.register(Record(Path(config.getoption("--record"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


def pytest_collection_finish() -> None:
    """Compiling makes millions of small objects, and each full collection would look through all of torch again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _fresh():
    """The same random numbers and an empty compile cache for each test, in any order."""
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class StopCompilingError(Exception):
    """Ends a compilation once its graph is seen: generating code would take most of a test's time."""


@pytest.fixture
def post_grad_graphs():
    """`post_grad_graphs(model, *args, **kwargs)`: what Inductor's post-grad custom pass gets. Makes no code."""

    def capture(model, *args, **kwargs):
        graphs = []

        def see(graph):
            graphs.append(graph)
            raise StopCompilingError

        compiled = torch.compile(model, fullgraph=True, options={"post_grad_custom_post_pass": see})
        with torch.no_grad(), pytest.raises(Exception, match="StopCompilingError"):
            compiled(*args, **kwargs)
        return graphs

    return capture


class Record:
    """Counts outcomes and writes them with what they were measured on. Leaves the exit status alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Set-up and tear-down count only when they decide the outcome.
        if report.when == "call" or report.outcome != "passed":
            self.counts["xfailed" if hasattr(report, "wasxfail") else report.outcome] += 1
            if report.failed:
                self.failed.append(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        import triton

        card = torch.cuda.get_device_name()
        record = {
            "card": card,
            "capability": "sm_{}{}".format(*torch.cuda.get_device_capability()),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "counts": dict(sorted(self.counts.items())),
            "failed": self.failed,
            "exit_status": int(exitstatus),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
        (self.folder / f"test-gpu-{slug}.json").write_text(json.dumps(record, indent=2) + "\n")


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
