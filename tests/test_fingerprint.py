"""A record of times says which state of its kernels it measured, and none is silently older than they are."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from fusion_passes import measured

ROOT = Path(__file__).parents[1]
NO_TIMES = ("accuracy-", "sanitizer-", "test-gpu-")


@pytest.fixture
def fingerprint(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import fingerprint

    yield fingerprint
    del sys.modules["fingerprint"]


def test_no_record_is_older_than_its_kernels(fingerprint):
    """Where this fails, a kernel has changed: run the command, or say in the table why the old figures stay."""
    unknown = [str(item) for item in fingerprint.stale() if item not in fingerprint.known()]
    entries = "\n".join(f"measure again, or put into {fingerprint.STALE}, with why: {item}" for item in unknown)
    assert not unknown, entries


def test_the_table_has_nothing_that_was_measured_again(fingerprint):
    stale = fingerprint.stale()
    for item, why in fingerprint.known().items():
        assert item in stale, f"remove from {fingerprint.STALE}: {item}"
        assert why.endswith("."), f"no reason: {item}"


def test_every_kernel_has_a_record_and_every_record_of_times_its_kernels(fingerprint):
    shared = {"__init__", "device", "fp8", "hopper", "paged"}
    kernels = {path.stem for path in (ROOT / "fusion_passes" / "kernels").glob("*.py")} - shared
    paths = fingerprint.paths()
    assert {kernel for path in paths for kernel in fingerprint.RECORDS[path.stem][0]} == kernels
    folders = ROOT / "fusion_passes" / "measured", ROOT / "benchmarks" / "results"
    others = {path for folder in folders for path in folder.glob("*.json")} - {*paths}
    assert all(path.name == "stale.json" or path.name.startswith(NO_TIMES) for path in others), others
    for path in paths:
        kernels, command = fingerprint.RECORDS[path.stem]
        words = shlex.split(command)
        assert (ROOT / words[1]).exists()
        assert ROOT / words[words.index("--record") + 1] == path.parent
        assert all(row.keys() >= {*kernels} for row in fingerprint.measured(json.loads(path.read_text())))


KERNEL, FP8 = "fusion_passes/kernels/paged_decode.py", "fusion_passes/kernels/fp8.py"
OP = "fusion_passes/ops/paged_attention.py"


@pytest.mark.parametrize(
    ("path", "old", "new", "counts"),
    [
        (KERNEL, '"""From this on,', '"""Beginning with this,', False),
        (KERNEL, "    # A fourth program", "    # One more program", False),
        (KERNEL, "MANY_SPLITS = 40", "MANY_SPLITS = (\n    40\n)", False),
        (KERNEL, "MANY_SPLITS = 40", "MANY_SPLITS = 41", True),
        (KERNEL, "wave = min(programs, 3)", "wave = min(programs, 4)", True),
        (FP8, "tl.clamp(x, -LIMIT, LIMIT", "tl.clamp(x, -LIMIT / 2, LIMIT", True),
        (FP8, '"""fp32 x as FP8:', '"""x as FP8:', False),
        (OP, "min(longest, paged_decode.MAX_QUERY_LEN)", "min(longest, 1)", True),
        (OP, '"""Sequences with few new tokens', '"""Those with few new tokens', False),
        (OP, "def gather(", "def gathered(", False),
    ],
)
def test_what_runs_counts_and_the_way_it_is_written_does_not(fingerprint, path, old, new, counts):
    def read(asked):
        source = fingerprint.read(asked)
        if asked != path:
            return source
        assert source.count(old) == 1
        return source.replace(old, new)

    assert (fingerprint.fingerprint("paged_decode", read) != fingerprint.fingerprint("paged_decode")) == counts


def test_why_a_kernel_does_not_take_a_call_does_not_count(fingerprint):
    def read(path):
        return fingerprint.read(path).replace("def why_unsupported(", "def why_not_supported(")

    assert fingerprint.fingerprint("paged_prefill_sm90", read) == fingerprint.fingerprint("paged_prefill_sm90")


def test_a_kernel_that_changes_makes_its_records_stale(fingerprint, monkeypatch):
    before, read = fingerprint.stale(), fingerprint.read
    changed = "fusion_passes/kernels/rope_quant_kv_write.py"
    monkeypatch.setattr(fingerprint.fingerprint, "__defaults__", (lambda p: read(p) + "\n",))
    assert fingerprint.stale() == before
    edit = lambda p: read(p).replace("launch_pdl=early", "launch_pdl=False") if p == changed else read(p)  # noqa: E731
    monkeypatch.setattr(fingerprint.fingerprint, "__defaults__", (edit,))
    new = {(item.record, item.kernel) for item in fingerprint.stale() if item not in before}
    assert new == {("decode", "rope_quant_kv_write"), ("kv_attention-rope_write", "rope_quant_kv_write")}
    (told,) = {str(item) for item in fingerprint.stale() if item.record == "decode" and item.kernel.startswith("rope")}
    assert "6 rows measured rope_quant_kv_write" in told
    assert told.endswith("python benchmarks/decode.py --record benchmarks/results")


def test_a_benchmark_writes_the_fingerprints(fingerprint, monkeypatch, tmp_path):
    import common

    monkeypatch.setattr(common, "machine", lambda: {"card": "a card"})
    common.write(tmp_path / "kv_attention-decode.json", {"rows": []})
    record = json.loads((tmp_path / "kv_attention-decode.json").read_text())
    assert record == {
        "card": "a card",
        "sources": {"paged_decode": fingerprint.fingerprint("paged_decode")},
        "rows": [],
    }
    del sys.modules["common"]


def test_a_verdict_by_an_older_record_says_so(monkeypatch):
    monkeypatch.setattr(measured, "_stale", lambda: frozenset({("a record", "kernel", "old")}))
    record = {"name": "a record", "sources": {"kernel": "old", "other": "new"}}
    assert measured.is_older(record, {})
    assert measured.is_older(record, {}, "kernel")
    assert not measured.is_older(record, {}, "other")
    assert not measured.is_older({"name": "of somebody's own"}, {}, "kernel")
    assert not measured.is_older(record, {"sources": {"kernel": "new", "other": "new"}})
    rows = [measured.Measurement(1, 2.0), measured.Measurement(8, 1.5, older=True), measured.Measurement(64, 1.2)]
    why = {size: measured.judge(rows, size, "it", "a card", "tokens").why for size in (1, 4, 8, 64)}
    older = [size for size, text in why.items() if text.endswith("tokens, as measured before its last change")]
    assert older == [4, 8]
