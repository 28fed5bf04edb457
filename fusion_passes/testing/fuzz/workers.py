"""The processes of a long run.  One that dies is a finding, and the run goes on without the program that it died of."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from fusion_passes.testing.fuzz import jobs

CRASHES = 10
"""Of one job, until the rest of it is given up."""


@dataclass(frozen=True)
class Task:
    """A job, and what is known of it from processes that it has ended.

    skip: (seed, at) of programs that are left out.  alone: compile each program by itself, to tell which one it is.
    together: the crash of several programs that were compiled as one, until it is known whose it is.
    """

    seed: int
    job: int
    shrink: int
    skip: frozenset[tuple[int, int]] = frozenset()
    alone: bool = False
    crashes: tuple[dict[str, Any], ...] = ()
    together: dict[str, Any] | None = None

    def after(self, how: str, doing: jobs.Doing) -> Task | None:
        """What is left to do after a crash; None where the job is given up."""
        crash = self._crash(how, doing)
        if len(doing.programs) > 1 and not self.alone:
            return replace(self, alone=True, together=crash)
        found = replace(self, crashes=(*self.crashes, crash), together=None)
        if doing.what == "shrinking":
            return replace(found, shrink=0)
        if not doing.programs or len(found.crashes) >= CRASHES:
            return None
        return replace(found, skip=self.skip | {(program.seed, program.at) for program in doing.programs})

    def given_up(self, how: str, doing: jobs.Doing) -> dict[str, Any]:
        """The record of a job that cannot be done."""
        return jobs.record(self.job, findings=[*self.crashes, self._crash(how, doing)])

    def finished(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record of a job with what it took to do it."""
        together = [] if self.together is None else [self.together]
        return {**record, "findings": [*record["findings"], *self.crashes, *together]}

    def _crash(self, how: str, doing: jobs.Doing) -> dict[str, Any]:
        """A finding of the program that was running; of several the first one stands for all."""
        count = len(doing.programs)
        if not count:
            text = f"crash: {how} while {doing.what} in job {self.job} of seed {self.seed}, which is given up"
            return {"kind": "crash", "text": text, "seed": None, "at": None, "test": ""}
        of = f" {count} programs as one, from this one on" if count > 1 else " this program"
        text = f"crash: {how} while {doing.what}{of}; one before it may have overwritten memory"
        return {"kind": "crash", "text": text, **asdict(doing.programs[0])}


class _Worker:
    """A process that does one task after the other, and says what it is doing."""

    def __init__(self, run: Callable[..., dict[str, Any]]) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, run), daemon=True)
        self.process.start()
        other.close()
        self.task: Task | None = None
        self.doing = jobs.Doing("starting")

    def give(self, task: Task) -> None:
        """Let it do a task."""
        self.task, self.doing = task, jobs.Doing("starting")
        with contextlib.suppress(BrokenPipeError):  # it has died: `said` tells
            self.connection.send(task)

    def said(self) -> tuple[str, Any]:
        """ "doing", "done" or "failed", with what it says; or "died", with how."""
        try:
            said: tuple[str, Any] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            return "died", f"the process died of {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        return said

    def stop(self) -> None:
        """End it."""
        self.connection.close()
        self.process.terminate()
        self.process.join()


def _serve(connection: Connection, run: Callable[..., dict[str, Any]]) -> None:
    jobs.start()
    with contextlib.suppress(EOFError):  # nobody asks for more
        while True:
            task = connection.recv()
            try:
                record = run(
                    task.seed,
                    task.job,
                    task.shrink,
                    skip=task.skip,
                    alone=task.alone,
                    tell=lambda doing: connection.send(("doing", doing)),
                )
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                how = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
                connection.send(("failed", how))
            else:
                connection.send(("done", record))


def run_all(
    tasks: Sequence[Task], processes: int, run: Callable[..., dict[str, Any]] = jobs.run
) -> Iterator[dict[str, Any]]:
    """The records of all tasks, as they come.  run: does a task; see `jobs.run`."""
    waiting = list(reversed(tasks))
    workers = [_Worker(run) for _ in range(min(processes, len(tasks)))]
    try:
        for worker in workers:
            worker.give(waiting.pop())
        while busy := {worker.connection: worker for worker in workers if worker.task is not None}:
            for ready in wait(list(busy)):
                worker = busy[ready]  # type: ignore[index]
                assert worker.task is not None
                kind, what = worker.said()
                if kind == "doing":
                    worker.doing = what
                    continue
                if kind == "done":
                    yield worker.task.finished(what)
                else:
                    left = worker.task.after(what, worker.doing)
                    if left is None:
                        yield worker.task.given_up(what, worker.doing)
                    else:
                        waiting.append(left)
                if kind == "died":
                    workers[workers.index(worker)] = worker = _replaced(worker, run)
                worker.task = None
                if waiting:
                    worker.give(waiting.pop())
    finally:
        for worker in workers:
            worker.stop()


def _replaced(worker: _Worker, run: Callable[..., dict[str, Any]]) -> _Worker:
    worker.stop()
    return _Worker(run)
