"""Starts workers, watches the clock, and puts the file together.

::

    problem ─▶ Auditor ─stdin─▶ worker ─stdout─▶ progress … done │ silence past the limit ─▶ killed, the next one is new
"""

from __future__ import annotations

import contextlib
import platform
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

import msgspec

import kbrl_async
from kbrl_async.errors import InfraError
from kbrl_async.kernels.audit.wire import READY, AuditOptions, AuditProgress
from kbrl_async.kernels.problems.audit_file import FLAGGED, NOT_AUDITED, VERSION, Audit, ProblemAudit, problem_hash
from protocols.records import Problem

Limits = AuditOptions
_START_S = 120.0
_GRACE_S = 5.0
"""A worker sees to the clock itself, unless it hangs."""


class Auditor:
    """One worker at a time, kept between problems and replaced when it died or hung."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._worker: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def __enter__(self) -> Auditor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            for pipe in (self._worker.stdin, self._worker.stdout):
                if pipe is not None:
                    pipe.close()
            self._worker, self._buffer = None, b""

    def audit(self, problem: Problem) -> ProblemAudit:
        """Within the limits, whatever the problem does.

        :raises InfraError: no worker starts here.
        """
        worker = self._running()
        began = time.monotonic()
        last = ProblemAudit(problem.problem_id, problem_hash(problem), NOT_AUDITED)
        patience = self.limits.time_limit_s + _GRACE_S
        try:
            assert worker.stdin is not None
            worker.stdin.write(msgspec.json.encode(problem) + b"\n")
            worker.stdin.flush()
            while True:
                line = self._line(began + patience)
                progress = msgspec.json.decode(line, type=AuditProgress)
                last = progress.audit
                if progress.done:
                    return last
        except TimeoutError:
            reason = f"it took longer than {self.limits.time_limit_s:g} s"
        except (EOFError, BrokenPipeError, ValueError, RecursionError):
            reason = f"its worker died; more than {self.limits.memory_limit_gib:g} GiB may be needed"
        self.close()
        seconds = round(time.monotonic() - began, 3)
        status = FLAGGED if last.flags else NOT_AUDITED
        reason = "; ".join(filter(None, (reason, last.reason)))
        return msgspec.structs.replace(last, status=status, reason=reason, seconds=seconds)

    def _is_running(self) -> bool:
        return self._worker is not None and self._worker.poll() is None

    def _running(self) -> subprocess.Popen[bytes]:
        if not self._is_running():
            self.close()
            options = msgspec.json.encode(self.limits).decode()
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "kbrl_async.kernels.audit.worker", options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(kbrl_async.__file__).parent.parent,
            )
            self._wait_for_start()
        assert self._worker is not None
        return self._worker

    def _wait_for_start(self) -> None:
        try:
            if self._line(time.monotonic() + _START_S) == READY:
                return
            cause = "it said what no worker says"
        except (TimeoutError, EOFError) as error:
            cause = f"it was silent for {_START_S:g} s" if isinstance(error, TimeoutError) else "it ended"
        self.close()
        raise InfraError(f"no worker for audits starts here: {cause}", "Its own message is on stderr, above")

    def _line(self, deadline: float) -> bytes:
        worker = self._worker
        assert worker is not None
        assert worker.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                data = worker.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not data:
                    raise EOFError
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _quiet(_so_far: Audit, _one: ProblemAudit) -> None:
    pass


def audit_problems(
    problems: Sequence[Problem],
    limits: Limits,
    *,
    suite: str,
    shapes: str = "cpu",
    created: str = "",
    known: Sequence[ProblemAudit] = (),
    jobs: int = 1,
    done: Callable[[Audit, ProblemAudit], None] = _quiet,
) -> Audit:
    """Every problem that `known` does not tell of, in order or `jobs` at a time; `done` is told of each, with all that
    there is so far. What did not fit beside others is tried once more alone. `created` is an ISO date for the file.
    """
    audit = Audit(
        VERSION, suite, shapes, limits.device, created, software(), limits.time_limit_s, limits.memory_limit_gib, []
    )  # fmt: skip
    there = {(one.problem_id, one.problem_hash): one for one in known if one.status != NOT_AUDITED}
    found = {p.problem_id: there[key] for p in problems if (key := (p.problem_id, problem_hash(p))) in there}

    def so_far() -> Audit:
        in_order = [found[problem.problem_id] for problem in problems if problem.problem_id in found]
        return msgspec.structs.replace(audit, problems=in_order)

    for at_once in (jobs, 1) if jobs > 1 else (1,):
        left = [p for p in problems if p.problem_id not in found or found[p.problem_id].status == NOT_AUDITED]
        for one in _audited(left, limits, at_once):
            found[one.problem_id] = one
            done(so_far(), one)
    return so_far()


def _audited(problems: Sequence[Problem], limits: Limits, jobs: int) -> Iterator[ProblemAudit]:
    """As they come."""
    auditors: SimpleQueue[Auditor] = SimpleQueue()

    def audit(problem: Problem) -> ProblemAudit:
        auditor = auditors.get()
        try:
            return auditor.audit(problem)
        finally:
            auditors.put(auditor)

    with contextlib.ExitStack() as stack:
        for _ in range(jobs):
            auditors.put(stack.enter_context(Auditor(limits)))
        with ThreadPoolExecutor(jobs) as pool:
            for future in as_completed([pool.submit(audit, problem) for problem in problems]):
                yield future.result()


def software() -> dict[str, str]:
    import torch

    return {"kbrl-async": "0.1.0", "torch": str(torch.__version__), "python": platform.python_version()}
