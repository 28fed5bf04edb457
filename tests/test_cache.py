"""Compiled code in Inductor's cache: reused when nothing changed, and then the report says so and what was fused; made
anew when an option, a rule's source or the package's source changed.  Each step is a process of its own: the first a
new one, the others forks of one that has imported torch (`tests/fresh.py`)."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusion_passes import PassConfig, PostGradPassManager
from tests import fresh
from tests.traced_rules import relu_squared_rule

ROOT = Path(__file__).parents[1]

PROGRAM = """
import json, sys, torch, fusion_passes
import rule

settings = json.loads(sys.argv[1])
uuid_only = settings.pop("uuid_only", False)
config = fusion_passes.PassConfig(**settings, extra_fusions=(rule.RULE,))
if uuid_only:
    print(json.dumps({"uuid": fusion_passes.PostGradPassManager(config).uuid()}))
    sys.exit()
report = fusion_passes.Report()
x = torch.randn(4, 8)
with torch.no_grad():
    out = fusion_passes.compile(rule.unfused, config, report=report)(x)
torch.testing.assert_close(out, rule.unfused(x))
(graph,) = report.graphs
print(json.dumps({
    "from_cache": graph.from_cache, "known": graph.known, "fused": report.count(), "text": str(report),
    "uuid": fusion_passes.PostGradPassManager(config).uuid(),
}))
"""

RULE = """
import torch, fusion_passes
def unfused(x):
    return torch.relu(x) ** 2
def replace(x):
    return torch.ops.fusion_passes_tests.relu_squared(x)
@torch.library.custom_op("fusion_passes_tests::relu_squared", mutates_args=())
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) ** 2
relu_squared.register_fake(torch.empty_like)
X = torch.empty(4, 8)
RULE = fusion_passes.TracedRule(name="relu_squared", search=unfused, replace=replace, example_inputs=(X,))
"""


class Processes:
    """Runs the program in fresh processes that share one cache directory and a copy of the package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = False
        shutil.copytree(ROOT / "fusion_passes", folder / "fusion_passes", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "rule.py").write_text(RULE)
        (folder / "program.py").write_text(PROGRAM)

    def run(self, **config: object) -> dict:
        return json.loads(self.python("program.py", json.dumps(config))[-1])

    def run_file(self, text: str) -> list[str]:
        """The lines that a program prints, in a fork."""
        self.started = True
        (self.folder / "other.py").write_text(text)
        return self.python("other.py")

    def python(self, *command: str) -> list[str]:
        """The lines that a program prints.  The first is a new process: no other has its seed of hashes."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"), "PYTHONPATH": str(self.folder)}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
        env |= {"PYTHONDONTWRITEBYTECODE": "1"}
        if self.started:
            done = fresh.run([*command], self.folder, env)
        else:
            new = [sys.executable, *command]
            done = subprocess.run(new, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        self.started = True
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def append(self, file: str, text: str) -> None:
        path = self.folder / file
        path.write_text(path.read_text() + text)


@pytest.fixture
def processes(tmp_path):
    return Processes(tmp_path)


def test_nothing_changed_is_reused_and_the_report_says_so(processes):
    first, second = processes.run(), processes.run()
    assert (first["from_cache"], first["fused"]) == (False, 1)
    assert (second["from_cache"], second["fused"]) == (True, 1)
    assert "(from cache)" in second["text"]
    assert "fused        relu_squared" in second["text"]
    assert first["uuid"] == second["uuid"], "the key must be the same in every process"

    shutil.rmtree(processes.folder / "cache" / "fusion_passes")
    third = processes.run()
    assert (third["from_cache"], third["known"]) == (True, False)
    assert "places and reasons are not on disk any more): 1 fused" in third["text"]

    processes.replace("rule.py", "return torch.ops", "return 1.0 * torch.ops")
    changed = processes.run()
    assert (changed["from_cache"], changed["fused"]) == (False, 1), "a changed rule is compiled anew"
    assert first["uuid"] != changed["uuid"]


def test_the_key_covers_options_rules_and_every_file_of_the_package(processes):
    processes.started = True

    def uuid(**config):
        return processes.run(uuid_only=True, **config)["uuid"]

    seen = [uuid(), uuid(profitability="ignore")]
    processes.replace("rule.py", "torch.relu(x) ** 2", "torch.relu(x) ** 2.0")
    seen.append(uuid())
    files = ("fusions/attention_quant.py", "kernels/attention_quant.py", "measured/kv_attention-rope_write.json")
    for file in files:
        processes.append(f"fusion_passes/{file}", "\n")
        seen.append(uuid())
    assert len(set(seen)) == len(seen)


@pytest.mark.timed
def test_the_key_takes_under_two_milliseconds():
    config = PassConfig(extra_fusions=(relu_squared_rule(),))
    manager = PostGradPassManager(config)
    manager.uuid()
    taken = []
    for _ in range(5):  # the machine may be busy
        start = time.perf_counter()
        manager.uuid()
        taken.append(time.perf_counter() - start)
    assert min(taken) < 2e-3


STALE = """
import torch, fusion_passes, helpers, mine
def compiled(report):
    torch._dynamo.reset()
    config = fusion_passes.PassConfig(extra_fusions=(mine.RULE,))
    fn = fusion_passes.compile(lambda x: torch.relu(x) ** 2, config, report=report)
    with torch.no_grad():
        return fn(torch.ones(2, 8))[0, 0].item()
def step():
    report = fusion_passes.Report()
    print(compiled(report), report.graphs[0].from_cache)
step()
helpers.FACTOR = 5.0
step()
"""
MINE = """
import torch, fusion_passes
def search(x):
    return torch.relu(x) ** 2
def replace(x):
    from helpers import factor
    return torch.relu(x) * factor()
RULE = fusion_passes.TracedRule(name="mine", search=search, replace=replace, example_inputs=(torch.empty(4, 8),))
"""


def test_compiled_code_follows_what_the_rule_calls(processes):
    """A helper of a lazily imported module, then its global: within one process, and from one to the next."""
    (processes.folder / "mine.py").write_text(MINE)

    def values(factor: float) -> list[str]:
        (processes.folder / "helpers.py").write_text(f"FACTOR = {factor}\ndef factor(): return FACTOR\n")
        return processes.run_file(STALE)

    assert values(2.0) == ["2.0 False", "5.0 False"]
    assert values(3.0) == ["3.0 False", "5.0 True"], "of the factor 5, there is code"
    assert values(2.0) == ["2.0 True", "5.0 True"]


def test_cleared_counters_do_not_hide_a_cached_graph(processes):
    processes.started = True
    processes.append(
        "program.py",
        """
torch._dynamo.utils.counters.clear()
torch._dynamo.reset()
again = fusion_passes.Report()
with torch.no_grad():
    fusion_passes.compile(rule.unfused, config, report=again)(x)
print(json.dumps({"from_cache": again.graphs[0].from_cache, "fused": again.count()}))
""",
    )
    assert processes.run() == {"from_cache": True, "fused": 1}
