"""Starts workers, watches the clock, and puts the file together.

::

    problem ─▶ Auditor ─stdin─▶ worker ─stdout─▶ progress … done │ silence past the limit ─▶ killed, the next one is new
"""

from __future__ import annotations

import platform
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

import kbrl_async
from kbrl_async.kernels.audit.wire import Options, Progress
from kbrl_async.kernels.problems.audit_file import FLAGGED, NOT_AUDITED, VERSION, Audit, ProblemAudit, problem_hash
from protocols.records import Problem

Limits = Options
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
        """Within the limits, whatever the problem does."""
        began = time.monotonic()
        last = ProblemAudit(problem.problem_id, problem_hash(problem), NOT_AUDITED)
        patience = self.limits.time_limit_s + _GRACE_S + (0.0 if self._is_running() else _START_S)
        try:
            worker = self._running()
            assert worker.stdin is not None
            worker.stdin.write(msgspec.json.encode(problem) + b"\n")
            worker.stdin.flush()
            while True:
                line = self._line(began + patience)
                progress = msgspec.json.decode(line, type=Progress)
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
        assert self._worker is not None
        return self._worker

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


def _quiet(_audit: ProblemAudit) -> None:
    pass


def audit_problems(
    problems: Iterable[Problem],
    limits: Limits,
    *,
    suite: str,
    shapes: str = "cpu",
    created: str = "",
    done: Callable[[ProblemAudit], None] = _quiet,
) -> Audit:
    """Every problem, one after the other; `done` is told of each. `created` is an ISO date for the file."""
    audited = []
    with Auditor(limits) as auditor:
        for problem in problems:
            audited.append(auditor.audit(problem))
            done(audited[-1])
    return Audit(
        VERSION,
        suite,
        shapes,
        limits.device,
        created,
        software(),
        limits.time_limit_s,
        limits.memory_limit_gib,
        audited,
    )


def software() -> dict[str, str]:
    import torch

    return {"kbrl-async": "0.1.0", "torch": str(torch.__version__), "python": platform.python_version()}
