"""Sanitizers in a run: on a random share of correct kernels, and every kernel that is the best of its problem.

A sanitizer costs a second or more where a verdict costs milliseconds, so not every kernel can have it.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from kbrl_async.errors import HostError, InfraError
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.sanitize.sanitize import Sanitizer
from kbrl_async.kernels.funnel.result import judged
from kbrl_async.kernels.stages import StageClock
from protocols.records import BenchReport, Candidate, Fault, Problem


class SpotChecks:
    """`share` 0: off. Closed by whoever made it."""

    def __init__(self, store: ArtifactStore, share: float, rng: random.Random | None = None) -> None:
        self._sanitizer = Sanitizer(store)
        self._share, self._rng = share, rng or random.Random()
        self._best: dict[str, float] = {}
        self.checked = 0
        self.found = 0
        self.failed = 0
        """Times that the sanitizer itself failed: the verdict then stands as it was."""

    def close(self) -> None:
        self._sanitizer.close()

    def check(
        self,
        problem: Problem,
        candidate: Candidate,
        artifacts: dict[str, Path],
        report: BenchReport,
        device: str = "cpu",
    ) -> BenchReport:
        """The report, or one with a fault where a sanitizer found one."""
        if self._share <= 0 or report.verdict.fault is not Fault.OK or not self._is_chosen(problem, report):
            return report
        clock = StageClock()
        try:
            found = self._sanitizer.run(problem, candidate, artifacts, device)
        except (HostError, InfraError):  # no candidate's fault, and no reason to lose its verdict (I4)
            self.failed += 1
            return report
        self.checked += 1
        verdict = judged(report.verdict, found)
        clock.ends("sanitize", verdict.fault, found.not_run)
        self.found += verdict.fault is not Fault.OK
        timing = report.timing if verdict.fault is Fault.OK else None
        return msgspec.structs.replace(report, verdict=verdict, timing=timing, stages=(*report.stages, *clock.reports))

    def _is_chosen(self, problem: Problem, report: BenchReport) -> bool:
        is_best = report.timing is not None and report.timing.lo > self._best.get(problem.problem_id, 0.0)
        if is_best and report.timing is not None:
            self._best[problem.problem_id] = report.timing.lo
        return is_best or self._rng.random() < self._share
