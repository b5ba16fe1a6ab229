"""What an agent that writes kernels can ask, one call at a time: `kbrl mcp` and the environments are shells around it.

::

    call ─▶ check what was given ─▶ wait for the bench (one; in order) ─▶ [thread: Verifier] ─▶ answer, kept in History
                                                        cancelled: stops between two steps, the next call begins then

Invariants
* One candidate at a time: two that are timed at once would slow each other. At most `MOST_WAITING` wait.
* A wrong candidate is an answer. What is asked wrongly is a `UserError`, what the host can't do a `HostError` or
  `InfraError`, tried twice; neither is ever an answer about the candidate (I4).
* What is kept is bounded in number and size; the oldest goes first (I10).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kbrl_async.errors import InfraError, UserError
from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.kernels.backends import guess_backend
from kbrl_async.kernels.funnel import Careful, Result, Verifier, VerifyOptions
from kbrl_async.kernels.funnel.careful import bench_cores, careful_bench
from kbrl_async.kernels.funnel.concurrent import with_retry
from kbrl_async.kernels.funnel.profiling import Profiled, profile
from kbrl_async.kernels.funnel.verifier import choose_device, shapes_for
from kbrl_async.kernels.problems import load_problems, parse_problem
from kbrl_async.kernels.problems.finding import choose
from kbrl_async.kernels.timing.baselines import over
from kbrl_async.kernels.timing.statistics import Interval
from kbrl_async.kernels.verify.options import Tick
from kbrl_async.lab.answers import (
    CandidateReport,
    Comparison,
    HistoryEntry,
    HistoryList,
    ProblemLine,
    ProblemList,
    ProblemView,
    ProfileReport,
    Speed,
)
from kbrl_async.lab.history import History
from kbrl_async.rollouts.prompts.templates import contract_of
from protocols.records import TIMING_CONFIDENCE, Problem, Timing

MOST_CHARACTERS = 1 << 20
"""Of a candidate or a problem; a kernel has a thousandth of it."""
MOST_WAITING = 64
_TELL_S = 0.5
_T = TypeVar("_T")
Told = Callable[[int, str], Awaitable[object]]
"""Hears of progress: steps done so far, and what is being done."""


class Cancelled(Exception):  # noqa: N818 - what has happened, not what is wrong
    """Nobody waits for the answer any more."""


class Steps:
    """Of one call, between its thread and the event loop."""

    def __init__(self) -> None:
        self.done, self.doing, self.is_cancelled = 0, "waiting for the bench", False

    def tick(self) -> None:
        """:raises Cancelled: nobody waits."""
        if self.is_cancelled:
            raise Cancelled
        self.done += 1


async def nobody(_done: int, _doing: str) -> None:
    """Hears nothing."""


class Workbench:
    """See the module::

        async with Workbench() as bench:
            report = await bench.verify("L1/13", source)

    `problems`: a folder; empty: the project's own suite. `history`: a file that outlasts the process.
    """

    def __init__(
        self,
        problems: str = "",
        device: str | None = None,
        history: Path | None = None,
        options: VerifyOptions | None = None,
        careful: Careful | None = None,
    ) -> None:
        self._problems, self._device = problems, device
        self._options, self._careful = options, careful or Careful()
        self._history = History(history)
        self._verifiers: dict[bool, Verifier] = {}
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._steps: set[Steps] = set()
        self._pool: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> Workbench:
        self._pool = ThreadPoolExecutor(1, "workbench")
        return self

    async def __aexit__(self, *_: object) -> None:
        for steps in self._steps:
            steps.is_cancelled = True
        if self._running:
            await asyncio.wait(self._running)
        assert self._pool is not None
        await asyncio.get_running_loop().run_in_executor(self._pool, self._close)
        self._pool.shutdown()

    def _close(self) -> None:
        while self._verifiers:
            self._verifiers.popitem()[1].close()

    # ── what needs no bench ─────────────────────────────────────────────────────────────────────────────────────────

    def list_problems(
        self, level: int | None = None, search: str = "", offset: int = 0, limit: int = 100
    ) -> ProblemList:
        wanted = search.lower()
        fitting = [p for p in self._known("cpu") if level in (None, p.level) and wanted in p.problem_id.lower()]
        shown = fitting[max(0, offset) : max(0, offset) + max(0, limit)]
        return ProblemList([ProblemLine(p.problem_id, p.level, p.name, p.split) for p in shown], len(fitting))

    def get_problem(self, problem_id: str, backend: str = "c") -> ProblemView:
        """:raises UserError: there is no such problem or backend."""
        shots = load_backend(backend).shots
        problem = self._problem(problem_id, shapes_for(choose_device(backend, self._device)))
        contract = contract_of(backend).replace("{source}", "").strip()
        return ProblemView(problem.problem_id, problem.source, backend, contract, shots[0].kernel if shots else "")

    def history(self, problem_id: str = "", limit: int = 20, *, sources: bool = False) -> HistoryList:
        return self._history.list(problem_id, limit, sources)

    # ── what needs it ───────────────────────────────────────────────────────────────────────────────────────────────

    async def verify(
        self, problem: str, candidate: str, backend: str = "", *, timing: bool = True, told: Told = nobody
    ) -> CandidateReport:
        """Through the whole funnel, timed as in training.

        :param problem: an id, or the source of a problem (anything with a line break).
        :param candidate: source, a model's answer, or the `kernel_id` of an earlier one.
        :raises UserError: and `HostError`, `InfraError`, `ProblemError`: nothing is known of the candidate then.
        """
        asked = self._asked(problem, candidate, backend)
        result = await self.run_work(functools.partial(self._verified, asked, False, timing), told)
        return self._keep("verify", asked, result)

    async def bench(self, problem: str, candidate: str, backend: str = "", *, told: Told = nobody) -> CandidateReport:
        """As `verify`, and timed carefully: some seconds more for an interval several times as narrow."""
        asked = self._asked(problem, candidate, backend)
        result = await self.run_work(functools.partial(self._verified, asked, True, True), told)
        return self._keep("bench", asked, result)

    async def profile(self, problem: str, candidate: str, backend: str = "", *, told: Told = nobody) -> ProfileReport:
        """What limits a correct candidate."""
        asked = self._asked(problem, candidate, backend)
        found = await self.run_work(functools.partial(self._profiled, asked), told)
        words = found.profile.text() if found.profile is not None else ""
        return ProfileReport(self._keep("profile", asked, found.result), words)

    async def compare(
        self, problem: str, first: str, second: str, backend: str = "", *, told: Told = nobody
    ) -> Comparison:
        """Both timed carefully, one after the other, against the same reference."""
        asked = [self._asked(problem, candidate, backend) for candidate in (first, second)]
        results = [await self.run_work(functools.partial(self._verified, one, True, True), told) for one in asked]
        one, other = (self._keep("compare", *pair) for pair in zip(asked, results, strict=True))
        return compared(one, other, results[0].timing, results[1].timing)

    async def run_work(self, work: Callable[[Tick], _T], told: Told) -> _T:
        """In its turn, in the bench's thread. Who is cancelled leaves at once; the work ends at its next step."""
        if len(self._running) >= MOST_WAITING:
            raise InfraError(f"{len(self._running)} calls wait for this bench already", "Ask again later")
        steps = Steps()
        task = asyncio.create_task(self._alone(work, steps))
        self._running.add(task)
        self._steps.add(steps)
        task.add_done_callback(functools.partial(self._ended, steps))
        said = (-1, "")
        try:
            while not (await asyncio.wait({task}, timeout=_TELL_S))[0]:
                if said != (steps.done, steps.doing):
                    said = (steps.done, steps.doing)
                    await told(*said)
            return task.result()
        finally:
            steps.is_cancelled = True

    def _ended(self, steps: Steps, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._steps.discard(steps)
        if not task.cancelled():
            task.exception()  # who asked may have gone

    async def _alone(self, work: Callable[[Tick], _T], steps: Steps) -> _T:
        async with self._lock:
            steps.tick()
            steps.doing = "verifying"
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, steps.tick)

    # ── in the bench's thread ───────────────────────────────────────────────────────────────────────────────────────

    def _verified(self, asked: AskedKernel, is_careful: bool, timing: bool, tick: Tick) -> Result:
        verifier = self._verifier(is_careful, asked)
        call = functools.partial(verifier.verify, asked.problem, asked.source, asked.backend, timing=timing, tick=tick)
        return with_retry(call, verifier.restart)

    def _profiled(self, asked: AskedKernel, tick: Tick) -> Profiled:
        return profile(self._verifier(False, asked), asked.problem, asked.source, asked.backend, tick=tick)

    def _verifier(self, is_careful: bool, asked: AskedKernel) -> Verifier:
        found = self._verifiers.get(is_careful)
        if found is None:
            options = self._options or VerifyOptions()
            if is_careful:
                device = choose_device(asked.backend, self._device)
                bench = careful_bench(device, self._careful)
                options = msgspec.structs.replace(options, bench=bench, cores=bench_cores(device, self._careful.core))
            found = self._verifiers[is_careful] = Verifier(self._device, options).__enter__()
        return found

    # ── what is asked, and what is kept ─────────────────────────────────────────────────────────────────────────────

    def _asked(self, problem: str, candidate: str, backend: str) -> AskedKernel:
        source = self._history.source(candidate) or candidate
        for what, text in (("problem", problem), ("candidate", source)):
            if len(text) > MOST_CHARACTERS:
                raise UserError(f"the {what} has {len(text):,} characters", f"Give at most {MOST_CHARACTERS:,}")
        if "\n" not in source.strip():
            cause = f"{source[:40]!r} is no source, and no kernel_id that is known here"
            raise UserError(cause, "Give the whole file, or a kernel_id from history")
        chosen = backend or guess_backend(source)
        shapes = shapes_for(choose_device(chosen, self._device))
        return AskedKernel(self._problem(problem, shapes), source, chosen)

    def _problem(self, wanted: str, shapes: str) -> Problem:
        """Never a file of this host: who asks may be elsewhere."""
        if "\n" in wanted:
            return parse_problem(wanted, "L0/own", shapes=shapes)
        return choose(wanted, self._known(shapes))

    def _known(self, shapes: str) -> list[Problem]:
        return _loaded(self._problems, shapes)

    def _keep(self, call: str, asked: AskedKernel, result: Result) -> CandidateReport:
        report = _report(asked, result)
        speed = report.speed
        self._history.add(
            HistoryEntry(
                report.kernel_id,
                report.problem_id,
                report.backend,
                call,
                report.ok,
                report.fault,
                None if speed is None else speed.speedup,
                None if speed is None else speed.lo,
                round(time.time(), 3),
                asked.source,
            )
        )
        return report


class AskedKernel(msgspec.Struct, frozen=True):
    problem: Problem
    source: str
    backend: str

    @property
    def kernel_id(self) -> str:
        return "k" + hashlib.sha256(f"{self.backend}\0{self.source}".encode()).hexdigest()[:12]


@functools.lru_cache(4)
def _loaded(problems: str, shapes: str) -> list[Problem]:
    return load_problems(problems, shapes=shapes)


def _report(asked: AskedKernel, result: Result) -> CandidateReport:
    verdict = result.verdict
    return CandidateReport(
        asked.kernel_id,
        result.problem_id,
        result.backend or asked.backend,
        result.ok,
        result.fault.value,
        result.stages[-1].name if result.stages else "",
        verdict.message,
        verdict.hint,
        verdict.passed,
        verdict.total,
        None if result.timing is None else _speed(result.timing),
    )


def _speed(timing: Timing) -> Speed:
    return Speed(
        timing.speedup,
        timing.lo,
        timing.hi,
        timing.confidence,
        timing.is_faster,
        timing.claim,
        timing.candidate_ms,
        timing.reference_ms,
        timing.n,
        timing.hardware,
    )


def compared(first: CandidateReport, second: CandidateReport, one: Timing | None, other: Timing | None) -> Comparison:
    if one is None or other is None:
        wrong = " and ".join(name for name, timing in (("first", one), ("second", other)) if timing is None)
        return Comparison(first, second, claim=f"no comparison: the {wrong} is not correct")
    # time of the first over the second's: the second's speedup through the first's
    ratio = over(Interval(other.speedup, other.lo, other.hi), Interval(one.speedup, one.lo, one.hi))
    claim = f"not told apart at {TIMING_CONFIDENCE:.0%}"
    if one.is_disturbed or other.is_disturbed:
        claim = "nothing is proven, others had the core"
    elif ratio.lo > 1:
        claim = "the second is proven faster"
    elif ratio.hi < 1:
        claim = "the first is proven faster"
    return Comparison(first, second, ratio.median, ratio.lo, ratio.hi, claim)
