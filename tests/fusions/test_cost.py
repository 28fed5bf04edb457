"""What the passes cost: nothing on the device, little time, and linear in the number of layers."""

import subprocess
import sys
import textwrap
import time

import pytest
import torch

from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.testing import capture
from tests.fusions.cases import FIRST, each
from tests.fusions.test_effects import is_high_precision
from tests.fusions.without_code import FUSE, STOCK

LAYERS = (8, 32)
PER_LAYER = 8e-3
"""Seconds of one slow core: 1 to 4 ms as measured, most for `rope_quant_kv_write`, whose layer has seven new nodes."""


def layers_of(case, count):
    """One graph with `count` copies of the case, each on inputs of its own computation."""
    inputs = case.inputs(7, "cpu")

    def fn(*inputs):
        outputs = []
        for i in range(count):
            moved = [x * (1.0 + i) if is_high_precision(x) and x.ndim > 1 else x for x in inputs]
            outputs.append(case.fn(*moved))
        return outputs

    with torch.no_grad():
        (graph,) = capture(fn, *inputs)
    return graph


def seconds(graph, config):
    report = Report()
    manager = PostGradPassManager(config, report)
    start = time.process_time()
    manager(graph)
    return time.process_time() - start, report


@pytest.mark.timed
@each(lambda case: case in FIRST)
def test_time_grows_linearly(rule, case):
    seconds(layers_of(case, 1), FUSE)  # imports, caches
    taken = {}
    for count in LAYERS:
        taken[count], report = seconds(layers_of(case, count), FUSE)
        assert report.count(rule=rule) == count
    few, many = LAYERS
    assert taken[many] < PER_LAYER * many
    assert taken[many] < 2.0 * taken[few] * many / few + 5e-3, taken


@pytest.mark.timed
@each(lambda case: case in FIRST)
def test_time_of_a_graph_where_nothing_is_fused(rule, case):
    graph = layers_of(case, LAYERS[1])
    seconds(graph, PassConfig())
    taken, report = seconds(graph, PassConfig())
    assert report.count() == 0
    assert len(report.sites) == LAYERS[1]
    assert taken < PER_LAYER * LAYERS[1]
    off, _ = seconds(graph, STOCK)
    assert off < 0.01


@pytest.mark.timed
def test_building_the_manager_takes_under_a_second():
    """In a process of its own that has Inductor loaded, with Triton blocked and no device: nothing is allocated."""
    program = """
    import sys, time
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name == "triton" or name.startswith("triton."):
                raise ModuleNotFoundError(name, name=name)
    sys.meta_path.insert(0, Blocked())
    import torch, torch._inductor.config, torch._inductor.custom_graph_pass
    def refuse(*args, **kwargs):
        raise AssertionError("the device was asked for")
    torch.cuda._lazy_init = refuse
    import fusion_passes
    fusion_passes.PostGradPassManager
    start = time.process_time()
    manager = fusion_passes.PostGradPassManager(fusion_passes.PassConfig())
    manager.uuid()
    print(time.process_time() - start, len(manager.rules), torch.cuda.is_initialized())
    assert not any(name == "triton" or name.startswith("triton.") for name in sys.modules)
    assert not any(name.startswith("fusion_passes.kernels") for name in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken, rules, initialized = done.stdout.split()
    assert float(taken) < 1.0
    assert int(rules) == len(FUSIONS)
    assert initialized == "False"


@each(lambda case: case in FIRST)
def test_fused_without_triton(rule, case, monkeypatch):
    """The CPU op is plain torch."""
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    graph = layers_of(case, 1)
    assert seconds(graph, FUSE)[1].count(rule=rule) == 1


@pytest.mark.gpu
def test_building_the_manager_allocates_nothing_on_the_device():
    torch.cuda.init()
    before = torch.cuda.memory_stats()["allocation.all.allocated"] if torch.cuda.memory_stats() else 0
    PostGradPassManager(FUSE).uuid()
    after = torch.cuda.memory_stats()["allocation.all.allocated"] if torch.cuda.memory_stats() else 0
    assert after == before
