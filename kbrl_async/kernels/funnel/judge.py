"""The bench half: what was built, against its problem: verdict, timing, sanitizers, baselines.

::

    BuildReport ─▶ fits this processor, all there ─▶ Bench ─▶ sanitizers, at times ─▶ other baselines ─▶ BenchReport

A sanitizer costs a second or more where a verdict costs milliseconds, so in a run not every kernel has it: a random
share of the correct ones, and each that is the best of its problem. A reference is compiled once a process and problem,
which takes from seconds to minutes. While these two take long, `alive` is called from another thread, so that a broker
does not take a busy bench for a hanging one.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from kbrl_async.errors import HostError, InfraError
from kbrl_async.kernels.backends.building import ArtifactStore, check_processor
from kbrl_async.kernels.backends.sanitize.parts import Sanitized
from kbrl_async.kernels.backends.sanitize.sanitize import Sanitizer
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.funnel.result import judged
from kbrl_async.kernels.profile import Profile
from kbrl_async.kernels.profile.counters import Counts
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import StageClock
from kbrl_async.kernels.timing.roofline import Peaks
from kbrl_async.kernels.verify import Bench, BenchOptions, zygote_for
from kbrl_async.kernels.verify.baselines import Baselines
from kbrl_async.kernels.verify.options import Tick, Watch, no_tick
from protocols.records import BenchReport, BuildReport, Candidate, Fault, Problem, Strictness

TICK_S = 5.0


class Judge:
    """One bench with all that belongs to it; one candidate at a time::

        with Judge(store, bench_options(TimingBench())) as judge:
            report = judge.judge(problem, candidate, builder.build(candidate, problem))

    `zygote` None: one of its own, whose children can run `backend`. `quiet` and `probe` are the bench's.
    """

    def __init__(
        self,
        store: ArtifactStore,
        options: BenchOptions,
        zygote: Zygote | None = None,
        *,
        backend: str = "c",
        sanitize_share: float = 0.0,
        baselines: Sequence[str] = (),
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
        probe: Callable[[], Peaks | None] | None = None,
    ) -> None:
        self._store, self._device, self._names = store, options.device, tuple(baselines)
        self.zygote = zygote or zygote_for(options.device, backend)
        self._own = None if zygote else self.zygote
        self.bench = Bench(self.zygote, options, quiet=quiet, probe=probe)
        self.baselines = Baselines(self.bench)
        self._sanitizer = Sanitizer(store)
        self._spot_checks = SpotChecks(self._sanitizer, sanitize_share)

    def __enter__(self) -> Judge:
        self.zygote.start()
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self.baselines, self._sanitizer, self.bench, *((self._own,) if self._own else ())):
            part.close()

    def judge(
        self,
        problem: Problem,
        candidate: Candidate,
        build: BuildReport,
        *,
        timing: bool = True,
        strictness: Strictness | None = None,
        tick: Tick = no_tick,
        alive: Tick = no_tick,
        watch: Watch | None = None,
        profile: bool = False,
        verified: BenchReport | None = None,
        group: str = "",
    ) -> BenchReport:
        """`tick` is called between steps of the bench, `alive` now and then while something else takes long. `watch`,
        `verified` and `group` as in `Bench.evaluate`. `profile`: say in the report what limits a correct kernel.

        :raises ProblemError: the problem's reference fails.
        :raises InfraError: the host does, or what was built can't run on it.
        """
        paths = self._built(build)
        counts = Counts()
        watch = counts if profile and self._device == "cpu" else watch
        report = self.bench.evaluate(
            problem,
            candidate,
            paths,
            timing=timing,
            strictness=strictness,
            tick=tick,
            watch=watch,
            verified=verified,
            group=group,
        )
        verdict = msgspec.structs.replace(report.verdict, rules=build.rules)
        report = msgspec.structs.replace(report, verdict=verdict)
        with ticking(alive):  # a sanitizer on a GPU takes minutes
            report = self._spot_checks.check(problem, candidate, paths, report, self._device)
            if self._names and report.timing is not None:
                timed, _ = self.baselines.beside(problem, report.timing, self._names)
                report = msgspec.structs.replace(report, timing=timed)
        if profile and report.timing is not None:
            evidence = report.verdict.evidence
            found = Profile(report.timing, self._device, None, evidence, counts.counts, build.remarks)
            report = msgspec.structs.replace(report, profile=found.text())
        return report

    def sanitize(self, problem: Problem, candidate: Candidate, build: BuildReport) -> Sanitized:
        """What sanitizers say of it, whatever its verdict is."""
        return self._sanitizer.run(problem, candidate, self._built(build), self._device)

    def _built(self, build: BuildReport) -> dict[str, Path]:
        check_processor(build.cpu)
        return artifact_paths(self._store, build)


class SpotChecks:
    """Which correct kernels run under sanitizers, and what becomes of their reports. `share` 0: none."""

    def __init__(self, sanitizer: Sanitizer, share: float, rng: random.Random | None = None) -> None:
        self._sanitizer, self._share, self._rng = sanitizer, share, rng or random.Random()
        self._best: dict[str, float] = {}
        self.checked = 0
        self.found = 0
        self.failed = 0
        """Times that the sanitizer itself failed: the verdict then stands as it was."""

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


@contextlib.contextmanager
def ticking(tick: Tick, period_s: float = TICK_S) -> Iterator[None]:
    """Calls `tick` now and then from another thread while the body runs."""
    if tick is no_tick:
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(period_s):
            tick()

    thread = threading.Thread(target=beat, name="ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
