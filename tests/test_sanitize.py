"""What the runner of compute-sanitizer reads from its logs, and that its tests exist."""

from tests import sanitize

CLEAN = """========= COMPUTE-SANITIZER
============================= test session starts ==============================
tests/kernels/test_a.py::test_b[cuda-1 FAILED] PASSED                    [ 50%]
tests/kernels/test_a.py::test_c SKIPPED (needs a card)                   [100%]
========= ERROR SUMMARY: 0 errors
"""
BROKEN = """========= COMPUTE-SANITIZER
tests/kernels/test_a.py::test_b PASSED                                   [ 25%]
========= Invalid __global__ read of size 4 bytes
=========     at _paged_prefill+0x2e0
========= Invalid __global__ write of size 2 bytes
tests/kernels/test_a.py::test_c FAILED                                   [ 50%]
tests/kernels/test_a.py::test_d """


def test_logs():
    assert sanitize.outcomes(CLEAN) == {"passed": 1, "skipped": 1}
    assert sanitize.outcomes(BROKEN) == {"passed": 1, "failed": 1}
    assert sanitize.failures(CLEAN) == {}
    assert sanitize.failures(BROKEN) == {"tests/kernels/test_a.py::test_c": ""}
    summary = "FAILED tests/kernels/test_a.py::test_c - AssertionError: assert 1 == 2\n"
    assert sanitize.failures(f"{BROKEN}\n{summary}") == {
        "tests/kernels/test_a.py::test_c": "AssertionError: assert 1 == 2"
    }
    dashes = """t.py::test_e[a] FAILED [ 50%]
t.py::test_e[a - b] FAILED
t.py::test_e[a - b] - c] ERROR [100%]
FAILED t.py::test_e[a] - one
FAILED t.py::test_e[a - b] - two - three
ERROR t.py::test_e[a - b] - c] - four
"""
    reasons = {"t.py::test_e[a]": "one", "t.py::test_e[a - b]": "two - three", "t.py::test_e[a - b] - c]": "four"}
    assert sanitize.failures(dashes) == reasons
    assert sanitize.errors(CLEAN) == 0
    assert sanitize.errors(BROKEN) == 2
    assert sanitize.errors(BROKEN + "\n========= ERROR SUMMARY: 3 errors\n") == 3
    assert sanitize.errors("compute-sanitizer: cannot be started") is None


def test_selection():
    every = sanitize.collect(("tests/ops/test_kv_cache_write.py",), sanitize.LEFT_OUT)
    some = sanitize.spread(every, 3)
    assert sanitize.spread(every, 1000) == every
    assert all("cuda" in each for each in every)
    assert len(every) > len(some)
    assert set(some) < set(every)
    for test in {each.split("[")[0] for each in every}:
        counts = [sum(x.split("[")[0] == test for x in ids) for ids in (every, some)]
        assert counts[1] == min(3, counts[0])


def test_what_did_not_run_is_not_clean(capsys):
    good = {"tests": {"passed": 3, "not_run": 0}, "failures": {}, "memory_errors": 0}
    assert sanitize.is_clean(good)
    assert not capsys.readouterr().err
    for bad in ({"failures": {"t.py::test_a": ""}}, {"memory_errors": None}, {"memory_errors": 2}):
        assert not sanitize.is_clean(good | bad)
    assert not sanitize.is_clean(good | {"tests": {"passed": 3, "not_run": 2}})
    assert "2 of the tests did not run" in capsys.readouterr().err
