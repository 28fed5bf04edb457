"""The benchmarks of kernels, as far as they go without a card: who may decline, what is recorded, what is missed."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests import fresh

FOLDER = Path(__file__).parents[1] / "benchmarks"
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a card")


@pytest.fixture
def load(monkeypatch):
    """Imports a module of `benchmarks/`; afterwards neither it nor its settings are there any more."""
    flags = [(torch._inductor.config, "force_disable_caches"), (torch._dynamo.config, "recompile_limit")]
    before, known = [getattr(config, name) for config, name in flags], {*sys.modules}
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for (config, name), value in zip(flags, before, strict=True):
        setattr(config, name, value)
    for name in {*sys.modules} - known:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def timed(load, monkeypatch):
    """`microseconds` with 5 microseconds for every graph."""
    common = load("common")
    monkeypatch.setattr(common, "capture", lambda turns, calls: turns[0]())
    monkeypatch.setattr(common, "replay", lambda graph: 5e3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return common.microseconds


def raises(error):
    def call():
        raise error

    return call


def test_a_backend_that_declines_is_recorded_with_its_reason(timed):
    declined = {}
    functions = {
        "ours": lambda: None,
        "flash": raises(RuntimeError("compiling failed:\n  RuntimeError: No available kernel. Aborting execution.")),
        "cudnn": raises(RuntimeError("cuDNN Frontend error: no plan")),
    }
    assert [*timed(functions, 1.0, declined)] == ["ours"]
    assert declined == {
        "flash": "RuntimeError: No available kernel. Aborting execution.",
        "cudnn": "cuDNN Frontend error: no plan",
    }


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_failure_is_not_a_backend_that_declines(timed, error):
    with pytest.raises(type(error), match="CUDA"):
        timed({"ours": raises(error)}, 1.0, {})


def test_ours_must_not_decline(timed):
    with pytest.raises(RuntimeError, match="No available kernel"):
        timed({"ours": raises(RuntimeError("No available kernel"))}, 1.0)


def test_a_configuration_that_does_not_fit_is_left_out(load, timed):
    from triton.runtime.errors import OutOfResources

    declined = {}
    assert timed({"large": raises(OutOfResources(300, 200, "shared memory"))}, 1.0, declined) == {}
    assert "shared memory" in declined["large"]


def test_a_run_that_stops_keeps_its_rows(load, monkeypatch, tmp_path):
    driver, section = load("kv_attention"), load("kv.rope_write")
    monkeypatch.setattr(
        driver, "write", lambda path, figures: path.write_text(json.dumps({"card": "a card"} | figures))
    )

    def stops(quick):
        yield {"tokens": 1}
        raise KeyboardInterrupt

    def ends(quick):
        yield {"tokens": 1}
        yield {"tokens": 8}

    def record():
        return json.loads((tmp_path / "kv_attention-rope_write.json").read_text())

    monkeypatch.setattr(section, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        driver.run("rope_write", True, tmp_path)
    assert (record()["complete"], record()["rows"]) == (False, [{"tokens": 1}])
    monkeypatch.setattr(section, "run", ends)
    driver.run("rope_write", True, tmp_path)
    assert (record()["complete"], len(record()["rows"])) == (True, 2)


def test_decode_says_which_targets_were_missed(load, monkeypatch, capsys):
    decode = load("kv.decode")
    monkeypatch.setattr(decode, "calls", lambda case: [])
    monkeypatch.setattr(decode, "copy", lambda: (None, 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    slow = decode.MAIN[0]

    def microseconds(functions, milliseconds):
        case = cases.pop(0)
        reached = case.bytes / (10**9 / 250.0) / 0.95
        return {"op": reached * (1.1 if case is slow else 1.0) if case.of_copy else 5.0, "copy": 250.0}

    cases = [*decode.MAIN]
    monkeypatch.setattr(decode, "microseconds", microseconds)
    rows = [*decode.run(True)]
    assert [row.get("of_copy_target") for row in rows] == [0.93, 0.92, 0.60, 0.60, None]
    assert [row["ratio_to_recorded_fa3_target"] for row in rows] == [1.35] * 5
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("targets missed: ")
    assert f"{slow}: of_copy 0.864 of 0.93" in told
    assert str(decode.MAIN[2]) + ": of_copy" not in told


@cpu_only
@pytest.mark.parametrize("name", ["attention_quant", "decode", "kv_attention"])
def test_without_a_card_a_sentence(name):
    root = FOLDER.parent
    done = fresh.run([str(FOLDER / f"{name}.py")], root, os.environ | {"PYTHONPATH": str(root)})
    assert done.returncode == 2
    assert done.stderr.endswith("error: needs a CUDA card\n")
    assert "Traceback" not in done.stderr
