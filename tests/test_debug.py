"""What the passes write down: graphs as files, and log lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion_passes
from fusion_passes import PassConfig
from fusion_passes.compiler.debug import GraphDump, readable
from tests.traced_rules import relu_squared_rule, unfused

ROOT = Path(__file__).parents[1]
FILES = ["after.py", "before.py", "changes.diff", "fused.py", "idioms.txt", "report.txt"]
X = torch.randn(4, 8)


def broken(x):
    x = unfused(x)
    torch._dynamo.graph_break()
    return x.cos()


@torch.no_grad()
def test_one_folder_per_graph(tmp_path):
    folder = tmp_path / "new" / "graphs"
    config = PassConfig(extra_fusions=(relu_squared_rule(),), debug_dir=folder)
    fusion_passes.compile(broken, config)(X)
    assert sorted(path.name for path in folder.iterdir()) == ["graph_000", "graph_001"]
    for graph in folder.iterdir():
        assert sorted(path.name for path in graph.iterdir()) == FILES

    first = {name: (folder / "graph_000" / name).read_text() for name in FILES}
    assert "aten.relu.default" in first["before.py"]
    assert "fusion_passes_tests.relu_squared" not in first["before.py"]
    assert "fusion_passes_tests.relu_squared" in first["after.py"]
    assert "aten.relu.default" not in first["after.py"]
    assert first["changes.diff"].startswith("--- before.py\n+++ after.py\n@@ ")
    assert "traced_rules.py" in first["before.py"], "the user's source lines"
    assert "graph 0: 1 fused, 1 sites" in first["report.txt"]
    assert not (folder / "graph_001" / "changes.diff").read_text()


@torch.no_grad()
def test_idioms_are_written_with_all_that_is_known(tmp_path):
    def quantized(x):
        return (x / 2.0).clamp(-448, 448).to(torch.float8_e4m3fn)

    fusion_passes.compile(quantized, PassConfig(debug_dir=tmp_path))(X)
    text = (tmp_path / "graph_000" / "idioms.txt").read_text()
    assert ": quantize(input=arg0_1, scale=None, scale_factor=" in text
    assert "clamp=(-448.0, 448.0)" in text
    assert "\n    computed by " in text


def test_folders_are_never_shared(tmp_path):
    (tmp_path / "graph_001").mkdir()
    for _ in range(3):
        GraphDump.open(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"graph_{n:03}" for n in (1, 2, 3, 4)]


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dump = GraphDump.open(None)
    dump.graph("before", torch.fx.symbolic_trace(unfused).graph)
    assert not list(tmp_path.iterdir())


def test_a_graph_without_a_module_is_readable():
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    assert "placeholder" in readable(graph)


SCRIPT = """
import torch, fusion_passes
from fusion_passes import PassConfig
from tests.traced_rules import relu_squared_rule, unfused
with torch.no_grad():
    fusion_passes.compile(unfused, PassConfig(extra_fusions=(relu_squared_rule(),)))(torch.ones(4, 8))
"""


@pytest.mark.parametrize(("logs", "every_site"), [("fusion_passes", False), ("+fusion_passes", True)])
def test_torch_logs_and_the_environment_variable(tmp_path, logs, every_site):
    settings = {"TORCH_LOGS": logs, "FUSION_PASSES_DEBUG": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | settings, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ": 1 of 1 sites fused" in done.stderr
    assert ("fused relu_squared at " in done.stderr) == every_site
    assert sorted(path.name for path in (tmp_path / "graph_000").iterdir()) == FILES
