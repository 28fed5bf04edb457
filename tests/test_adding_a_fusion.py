"""A fusion is its own files and a line in `fusions.NAMES`: all else that names it follows from these."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_passes.tools import tables

ROOT = Path(__file__).parents[1]
OP = '''
"""relu and a scale, as one op."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.kernel import Kernel

KERNEL = Kernel(name="the toy kernel", module="fusion_passes.kernels.toy", takes={"input": "float32"})


@dataclass(frozen=True, eq=False)
class ToyArguments(Arguments):
    """`relu(x) * factor`."""

    x: Tensor
    factor: float = 2.0


def _compute(a: ToyArguments) -> Tensor:
    return a.x.relu() * a.factor


toy = declare("toy", ToyArguments, fake=_compute, cpu=_compute, cuda=_compute, kernels=(KERNEL,))
'''
RULE = '''
"""relu followed by a multiplication."""

import torch

from fusion_passes.fusions.rule import Level, Rule
from fusion_passes.graph.match import Match


class Toy(Rule[Match]):
    name = "toy"
    summary = "relu and a factor: one op"
    level = Level.O1
    ops = ("toy",)

    def pattern(self, idioms):
        for node in idioms.graph.nodes:
            if node.target is torch.ops.aten.mul.Tensor and node.args[0].target is torch.ops.aten.relu.default:
                relu = node.args[0]
                yield Match(output=node, nodes=frozenset({relu, node}), inputs=(relu.args[0],))

    def replacement(self, m, call):
        return call(torch.ops.fusion_passes.toy.default, *m.inputs, m.output.args[1])
'''
PAGE = "<!-- table: fusions -->\n<!-- end of table -->\n<!-- table: kernels toy -->\n<!-- end of table -->\n"
PROGRAM = """
import contextlib, io, json, sys
import torch
import fusion_passes
from fusion_passes import PassConfig, Report, __main__
from fusion_passes.compiler.config import VARIABLES
from fusion_passes.compiler.manager import PostGradPassManager
from fusion_passes.testing import capture
from fusion_passes.tools.tables import updated

def printed(*argv):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        __main__.main(argv)
    return text.getvalue()

(graph,) = capture(lambda x: x.relu() * 3.0, torch.randn(4))
uuids = [PostGradPassManager(PassConfig(toy=state, debug_dir=None)).uuid() for state in ("on", "off")]
manager = PostGradPassManager(PassConfig.from_env({"FUSION_PASSES_TOY": "required"}), Report())
manager(graph)
print(json.dumps({
    "from": fusion_passes.__file__,
    "switch": PassConfig(toy=True).toy,
    "variable": VARIABLES["FUSION_PASSES_TOY"],
    "list": printed("list"),
    "doctor": printed("doctor"),
    "uuids": uuids,
    "targets": [str(node.target) for node in graph.nodes],
    "result": fusion_passes.ops.declare.OPS["toy"][0].name,
    "page": updated(sys.argv[1]),
}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a copy of the package with one fusion more says of it."""
    copy = tmp_path_factory.mktemp("copy")
    package = copy / "fusion_passes"
    shutil.copytree(ROOT / "fusion_passes", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "ops" / "toy.py").write_text(OP)
    (package / "fusions" / "toy.py").write_text(RULE)
    names = package / "fusions" / "__init__.py"
    names.write_text(names.read_text().replace("NAMES = (\n", 'NAMES = (\n    "toy",\n', 1))
    environ = {name: x for name, x in os.environ.items() if not name.startswith("FUSION_PASSES_")}
    environ["PYTHONPATH"] = str(copy)
    command = [sys.executable, "-c", PROGRAM, PAGE]
    done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["from"]).parent == package
    return answer


def test_it_has_a_switch_and_a_variable(told):
    assert (told["switch"], told["variable"]) == ("on", "toy")


def test_it_is_listed_with_its_kernel(told):
    assert (
        "toy                  FUSION_PASSES_TOY                  O1     no      relu and a factor: one op"
        in told["list"]
    )
    assert "the toy kernel: compute capability 8.9 or later, Triton; input float32" in " ".join(told["list"].split())
    assert "the toy kernel: " in told["doctor"]


def test_it_is_in_the_tables_of_the_docs(told):
    assert (
        "| `toy` | `FUSION_PASSES_TOY` | O1 | relu and a factor: one op | bit for bit the unfused graph's |"
        in told["page"]
    )
    assert "|  | toy kernel |\n| --- | --- |\n| GPU | compute capability 8.9 or later, Triton |" in told["page"]


def test_its_switch_is_part_of_the_cache_key(told):
    on, off = told["uuids"]
    assert on
    assert on != off


def test_it_is_applied(told):
    assert [name for name in told["targets"] if "toy" in name] == ["fusion_passes.toy.default"]
    assert "aten.relu.default" not in told["targets"]


def test_tables_of_the_docs_are_up_to_date():
    tables_of = {page: text for page in (ROOT / "docs").glob("*.md") if "\n<!-- table: " in (text := page.read_text())}
    assert tables_of
    for page, text in tables_of.items():
        assert tables.updated(text) == text, f"out of date: python -m fusion_passes.tools.tables docs/{page.name}"
        assert text.count("\n<!-- table: ") == text.count("\n<!-- end of table -->") == len(tables.MARKED.findall(text))
