"""A long run of the fuzzer: jobs in processes, of which some die."""

import json
import os
import subprocess
import sys

import pytest

from fusion_passes.testing.fuzz import campaign, code, jobs, workers

PROGRAMS = 12
DYING = f"""
import os
from fusion_passes.testing.fuzz import campaign, code, jobs

jobs.JOB = {PROGRAMS}


def run(seed, job, shrink, **options):
    def check(program):
        if job == 0 and program == pure[2]:
            os.abort()
        return {{}}

    def check_together(programs):
        if job == 1 and writing[0] in programs:
            os._exit(3)
        if job == 2 and len(programs) > 1:
            os.abort()
        if job == 3:
            raise ZeroDivisionError("nobody has expected that")
        return code.Together()

    campaign.check, code.check_together = check, check_together
    programs = campaign.draw(seed * 1_000_003 + job, jobs.JOB)
    pure, writing = ([p for p in programs if p.writes is writes] for writes in (False, True))
    if job == 4:
        os._exit(1)
    return jobs.run(seed, job, shrink, **options)
"""


def drawn(job, seed=0):
    return list(campaign._draw(seed * 1_000_003 + job, PROGRAMS, None))


@pytest.mark.slow
def test_a_process_that_dies_is_a_finding_and_the_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "dying_jobs.py").write_text(DYING)
    monkeypatch.syspath_prepend(tmp_path)
    import dying_jobs

    seed = next(s for s in range(100) if all(len([o for o in drawn(j, s) if o[0].writes]) > 1 for j in (1, 2, 3)))
    tasks = [workers.Task(seed, job, shrink=0) for job in range(6)]
    records = {record["job"]: record for record in workers.run_all(tasks, 2, dying_jobs.run)}
    assert set(records) == set(range(6))
    for job, record in records.items():
        assert record["programs"] == (0 if job == 4 else PROGRAMS)
        places = {(finding["seed"], finding["at"]): finding["text"] for finding in record["findings"]}
        if job == 4:
            assert list(places) == [(None, None)]
            assert "exit code 1 while starting in job 4" in places[None, None]
            continue
        pure, writing = ([o[1:] for o in drawn(job, seed) if o[0].writes is writes] for writes in (False, True))
        if job == 0:
            assert "SIGABRT while checking this program" in places.pop(pure[2])
        if job == 1:
            assert "exit code 3 while checking this program" in places.pop(writing[0])
        if job == 2:
            assert "SIGABRT while checking" in places[writing[0]]
            assert " programs as one, from this one on" in places.pop(writing[0])
        if job == 3:
            assert set(places) == set(writing)
            assert all("ZeroDivisionError: nobody has expected that (" in text for text in places.values())
            places = {}
        assert not places


PLACES = tuple(jobs.Named(7, at, f"# test {at}") for at in range(3))


def test_of_programs_that_were_compiled_as_one_each_is_tried_alone():
    task = workers.Task(0, 5, 3)
    left = task.after("the process died", jobs.Doing("checking", PLACES))
    assert (left.alone, left.crashes, left.skip) == (True, (), frozenset())
    (kept,) = left.finished(jobs.record(5))["findings"]
    assert kept["text"].startswith("crash: the process died while checking 3 programs as one, from this one on")
    left = left.after("the process died", jobs.Doing("checking", PLACES[1:2]))
    assert (left.alone, left.skip) == (True, {(7, 1)})
    (found,) = left.finished(jobs.record(5))["findings"]
    assert (found["kind"], found["seed"], found["at"], found["test"]) == ("crash", 7, 1, "# test 1")


def test_what_dies_while_it_is_shrunk_is_not_shrunk():
    left = workers.Task(0, 5, 3).after("the process died", jobs.Doing("shrinking", PLACES[:1]))
    assert (left.shrink, left.skip, len(left.crashes)) == (0, frozenset(), 1)


def test_a_job_that_dies_again_and_again_is_given_up():
    task = workers.Task(0, 5, 3)
    assert task.after("the process died", jobs.Doing("drawing")) is None
    for at in range(workers.CRASHES - 1):
        task = task.after("the process died", jobs.Doing("checking", (jobs.Named(7, at, ""),)))
        assert task is not None
    doing = jobs.Doing("checking", (jobs.Named(7, 99, ""),))
    assert task.after("the process died", doing) is None
    record = task.given_up("the process died", doing)
    assert (record["programs"], len(record["findings"])) == (0, workers.CRASHES)


def test_programs_that_are_skipped_are_not_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(campaign, "check", lambda program: checked.append(program) or {})
    monkeypatch.setattr(campaign.code, "check_together", lambda some: checked.extend(some) or code.Together())
    (first, *rest), told = drawn(0), []
    outcome = campaign.run(0, PROGRAMS, skip={first[1:]}, alone=True, tell=told.append)
    assert outcome.programs == PROGRAMS
    assert sorted(map(str, checked)) == sorted(str(program) for program, _, _ in rest)
    assert [program for ((program, _, _),) in told] == checked


def test_the_command_keeps_what_it_did(tmp_path):
    command = [sys.executable, "-m", "fusion_passes.testing.fuzz", "--programs", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "0 programs, 0 findings" in done.stdout
    assert json.loads((tmp_path / "summary-0.json").read_text())["findings"] == []


def test_a_run_that_was_stopped_goes_on(tmp_path):
    crash = {"kind": "crash", "text": "crash: it died", "seed": 3, "at": 4, "test": ""}
    record = jobs.record(0, programs=200, findings=[crash])
    (tmp_path / "jobs-0.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record)[:50])
    command = [sys.executable, "-m", "fusion_passes.testing.fuzz", "--programs", "200", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stderr
    assert "1 of 1 jobs are done already" in done.stdout
    assert json.loads((tmp_path / "summary-0.json").read_text())["findings"][0]["kind"] == "crash"
