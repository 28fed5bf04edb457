"""Compiled code in Inductor's cache: reused when nothing changed, and then the report says so and what was fused; made
anew when an option, a rule's source or the package's source changed.  Each step is a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fusion_passes import PassConfig, PostGradPassManager, TracedRule, compiled
from tests.traced_rules import relu_squared_rule, unfused

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
        shutil.copytree(ROOT / "fusion_passes", folder / "fusion_passes", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "rule.py").write_text(RULE)
        (folder / "program.py").write_text(PROGRAM)

    def run(self, **config: object) -> dict:
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"), "PYTHONPATH": str(self.folder)}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "program.py", json.dumps(config)],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

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


def test_a_changed_rule_is_compiled_anew(processes):
    first = processes.run()
    processes.append("rule.py", "\n# changed\n")
    second = processes.run()
    assert (second["from_cache"], second["fused"]) == (False, 1)
    assert first["uuid"] != second["uuid"]


def test_the_key_covers_options_rules_and_every_file_of_the_package(processes):
    def uuid(**config):
        return processes.run(uuid_only=True, **config)["uuid"]

    seen = [uuid(), uuid(profitability="ignore")]
    for file in ("rule.py", "fusion_passes/fusions/attention_quant.py", "fusion_passes/kernels/attention_quant.py"):
        processes.append(file, "\n# changed\n")
        seen.append(uuid())
    assert len(set(seen)) == len(seen)


def test_the_key_takes_under_two_milliseconds():
    compiled._package_source.cache_clear()
    config = PassConfig(extra_fusions=(relu_squared_rule(),))
    manager = PostGradPassManager(config)
    manager.uuid()
    start = time.perf_counter()
    manager.uuid()
    assert time.perf_counter() - start < 2e-3


def test_a_function_s_closure_is_in_the_key():
    def rule(factor):
        return TracedRule(
            name="scaled", search=unfused, replace=lambda x: unfused(x) * factor, example_inputs=(torch.empty(4),)
        )

    keys = {compiled.key("", (rule(factor),)) for factor in (1.0, 1.0, 2.0)}
    assert len(keys) == 2


def test_a_rule_without_source_is_not_cached():
    """It could change unseen: two rules typed at a prompt would share a key."""
    namespace = {}
    exec("def search(x):\n    return x.relu() ** 2\ndef replace(x):\n    return x.clamp(min=0) ** 2", namespace)
    rule = TracedRule(
        name="typed",
        search=namespace["search"],
        replace=namespace["replace"],
        example_inputs=(torch.empty(4),),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.log, "warning", lambda *_: None)
        assert compiled.key("", (rule,)) is None


def test_a_function_in_a_closure_is_in_the_key_by_its_source():
    def rule(inner):
        return TracedRule(
            name="nested", search=unfused, replace=lambda x: inner(unfused(x)), example_inputs=(torch.empty(4),)
        )

    address = " at " + "0x"  # not in this file
    assert address not in "".join(compiled._rule_texts(rule(unfused)))
    first, second = (compiled.key("", (rule(unfused),)) for _ in range(2))
    assert first == second
    assert first is not None


def test_cleared_counters_do_not_hide_a_cached_graph(processes):
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
