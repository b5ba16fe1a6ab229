"""The front door: `Bench.evaluate` takes a problem and a compiled candidate, and answers with a verdict and
a timing.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from kbrl_async.errors import InfraError
from kbrl_async.sandbox import Zygote
from kbrl_async.timing.host import pinned
from kbrl_async.verifying.checks import Checker
from kbrl_async.verifying.options import BenchOptions
from kbrl_async.verifying.reference import Reference, References
from kbrl_async.verifying.report import verdict_of
from kbrl_async.verifying.session import CandidateFault
from kbrl_async.verifying.stopwatch import Stopwatch
from protocols.records import BenchReport, Candidate, Fault, Problem, Timing, Verdict

ZYGOTE_PRELOAD = ("torch", "numpy", "kbrl_async.verifying.runner")


def _nothing() -> None:
    pass


class Bench:
    """Verifies and times one candidate at a time::

        with Zygote(ZYGOTE_PRELOAD) as zygote, contextlib.closing(Bench(zygote)) as bench:
            report = bench.evaluate(problem, candidate, {source_key: path_of_so})

    `seeds` is where secrets come from: `secrets` by default; a test may pass a seeded `random.Random`.
    Raises `ProblemError` where the problem's reference fails, `InfraError` where the host does; neither is a verdict.
    """

    def __init__(self, zygote: Zygote, options: BenchOptions | None = None, seeds: random.Random | None = None) -> None:
        self._zygote = zygote
        self._options = options or BenchOptions()
        self._rng = seeds or secrets.SystemRandom()
        self._references = References(zygote, self._options, self._rng)
        self._generation = zygote.generation

    def close(self) -> None:
        self._references.close()

    @property
    def references_kept(self) -> int:
        """Living reference children."""
        return len(self._references)

    def evaluate(
        self,
        problem: Problem,
        candidate: Candidate,
        artifacts: dict[str, Path],
        *,
        timing: bool = True,
        tick: Callable[[], None] = _nothing,
    ) -> BenchReport:
        """Blocks for up to a few seconds; `tick` is called between steps. Pins the calling thread to the
        options' cores.
        """
        started = time.time()
        self._notice_restart()
        with pinned(self._options.cores):
            reference = self._references.get(problem)
            try:
                verdict, timed = self._judge(reference, candidate, artifacts, timing, tick)
            except (CandidateFault, PermissionError, OSError) as error:
                # Candidate faults are caught where the candidate is called: what arrives here is the reference's.
                self._references.drop(reference)
                raise InfraError(f"the reference of {problem.problem_id} failed while it was used: {error}") from error
            except InfraError:
                self._references.drop(reference)
                raise
        return BenchReport(verdict, timed, started_at=started, finished_at=time.time())

    def _notice_restart(self) -> None:
        """References die with their zygote; they are made anew."""
        self._zygote.start()
        if self._zygote.generation != self._generation:
            self._generation = self._zygote.generation
            self._references.close()

    def _judge(
        self,
        reference: Reference,
        candidate: Candidate,
        artifacts: dict[str, Path],
        timing: bool,
        tick: Callable[[], None],
    ) -> tuple[Verdict, Timing | None]:
        checker = Checker(self._zygote, reference, self._options, self._rng)
        try:
            checker.start(candidate, artifacts)
            tick()
            checker.run(tick)
            verdict = verdict_of(checker)
            if verdict.fault is not Fault.OK or not timing:
                return verdict, None
            return self._timed(checker, candidate, artifacts, verdict, tick)
        finally:
            checker.close()

    def _timed(
        self,
        checker: Checker,
        candidate: Candidate,
        artifacts: dict[str, Path],
        verdict: Verdict,
        tick: Callable[[], None],
    ) -> tuple[Verdict, Timing | None]:
        timed = self._measure(checker, tick)
        if checker.fault is not None:
            return verdict_of(checker), None
        assert timed is not None
        if timed.speedup <= self._options.recipe.suspicious:
            return verdict, timed
        checker.restart(candidate, artifacts)
        again = None if checker.fault else self._measure(checker, tick)
        if again is None:
            return verdict_of(checker), None
        return verdict, min(timed, again, key=lambda t: t.speedup)

    def _measure(self, checker: Checker, tick: Callable[[], None]) -> Timing | None:
        twin = checker.reference.twin(self._zygote)
        stopwatch = Stopwatch(checker, twin, self._options, self._rng, tick)
        try:
            return stopwatch.run()
        finally:
            stopwatch.close()
            twin.close()
