"""The front door: `Bench.evaluate` takes a problem and a compiled candidate, and answers with a verdict and
a timing.
"""

from __future__ import annotations

import contextlib
import functools
import random
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import msgspec
import torch

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.backends import backend, modules_of
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import StageClock
from kbrl_async.kernels.timing import ready
from kbrl_async.kernels.timing.cpu.host import pinned
from kbrl_async.kernels.timing.roofline import RULE, Peaks, better
from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.checks import Checker, submitted
from kbrl_async.kernels.verify.device import Device, device_of
from kbrl_async.kernels.verify.doubts import settled
from kbrl_async.kernels.verify.family import Family, KnownTiming
from kbrl_async.kernels.verify.floor import Floor
from kbrl_async.kernels.verify.hoarding import WAITED, NoMemory, held_by_it, is_hoarder, is_out_of_memory
from kbrl_async.kernels.verify.input_set import place
from kbrl_async.kernels.verify.memory import Surplus
from kbrl_async.kernels.verify.options import BenchOptions, Tick, Watch, no_tick, options_for_interpreter
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.references import References
from kbrl_async.kernels.verify.report import placed, verdict_of
from kbrl_async.kernels.verify.session import CandidateFault, Judged, Submission
from kbrl_async.kernels.verify.several import Several
from kbrl_async.kernels.verify.sharing import Shared
from protocols.records import OBSERVED, BenchReport, Candidate, Fault, Problem, Strictness, Timing, Verdict

_TRIES = 3
"""Of one candidate, where the device has no memory left: between two of them all that is kept is given back."""

_OF_A_REFERENCE = {f"a reference's {part}": f"its {part}" for part in ("process", "draws", "sets")} | {WAITED: WAITED}
"""Spans, and what they are in the detail of the stage `reference`."""


def zygote_for(device: str, backend: str = "c") -> Zygote:
    """A zygote whose children can run kernels of any backend of ours, and of `backend`, on `device` (`"cpu"`, `"cuda"`,
    `"cuda:N"`).
    """
    return device_of(device).zygote(modules_of(backend))


class _Job(msgspec.Struct, frozen=True):
    """One call of `Bench.evaluate`, or its part of one workload."""

    problem: Problem
    candidate: Candidate
    artifacts: dict[str, Path]
    timing: bool
    strictness: Strictness | None
    tick: Tick
    watch: Watch | None
    verified: BenchReport | None
    group: str
    clock: StageClock


class Bench:
    """Verifies and times one candidate at a time::

        options = bench_options(TimingBench())
        with zygote_for("cpu") as zygote, contextlib.closing(Bench(zygote, options)) as bench:
            report = bench.evaluate(problem, candidate, {source_key: path_of_so})

    `seeds` is where secrets come from: `secrets` by default; a test may pass a seeded `random.Random`.
    Raises `ProblemError` where the problem's reference fails, `InfraError` where the host does; neither is a verdict.
    """

    def __init__(
        self,
        zygote: Zygote,
        options: BenchOptions,
        seeds: random.Random | None = None,
        *,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
        probe: Callable[[], Peaks | None] | None = None,
        device: Device | None = None,
    ) -> None:
        self._zygote, self._device = zygote, device or device_of(options.device)
        self.options = self._device.fitted(options)
        self._rng = seeds or secrets.SystemRandom()
        self.references = References(zygote, self.options, self._rng, self._device)
        self._surplus = Surplus()
        self._generation = zygote.generation
        self._device.open(self.options.memory_share)
        self.quiet = quiet
        """Entered around each measurement, by a bench that shares its device: a quiet window."""
        self.probe = probe
        """Measures the host's peaks, see `timing.peaks.peaks_of`: before the first timing where none are known, and
        once more before a time is called impossible. Called in a quiet window: others' work would lower them, and
        fast kernels would seem impossible.
        """
        self.peaks = self.options.peaks
        self._plan = ""
        """Of the last candidate that was right on its input sets."""
        self._is_short = False
        """Whether a library was short of memory, which others plan with, in what was judged last."""

    def close(self) -> None:
        self.references.close()

    def settle(self) -> None:
        """Returns when nothing that was started for later candidates is on the device any more."""
        self.references.settle()

    @property
    def device(self) -> str:
        return self.options.device

    def evaluate(
        self,
        problem: Problem,
        candidate: Candidate,
        artifacts: dict[str, Path],
        *,
        timing: bool = True,
        strictness: Strictness | None = None,
        tick: Tick = no_tick,
        watch: Watch | None = None,
        verified: BenchReport | None = None,
        group: str = "",
    ) -> BenchReport:
        """Blocks for up to a few seconds; `tick` is called between steps, and may raise to end it. Pins the calling
        thread to the options' cores. `watch` sees a correct candidate on a processor run once more. `verified`: what a
        verifier has found of it, which holds here too where what it records has the same steps. `group`: equal sources
        of one share a timing, never a verdict, and what is clearly slower than its reference need not see all sets
        (`BenchOptions.check_s`); empty: each is timed, and sees all.
        """
        started = time.time()
        if backend(candidate.backend).is_interpreted(self.options.device):
            timing = False
            backend(candidate.backend).refuse(candidate.source, problem.source)
        self._surplus.check()
        self._notice_restart()
        self._device.enter()
        job = _Job(problem, candidate, artifacts, timing, strictness, tick, watch, verified, group, StageClock())
        with pinned(self.options.cores), torch.no_grad(), ExitStack() as after:
            after.callback(self.references.rest)  # what others wait for is theirs afterwards
            family, verdict, timed = self._tried(job)
        timed = None if timed is None else msgspec.structs.replace(timed, ratios=())
        plan = self._plan if verdict.fault is Fault.OK and len(family.cases) == 1 else ""
        if verified is not None and plan and plan == verified.plan:
            verdict = verified.verdict
        verdict = placed(verdict, candidate.source)
        return BenchReport(
            verdict, timed, started_at=started, finished_at=time.time(), stages=job.clock.reports, plan=plan
        )

    def _tried(self, job: _Job) -> tuple[Family, Verdict, Timing | None]:
        """More than once, where memory may be lacking because of others, who are waited for: a short while, and before
        the last time for all of the device, a minute at most. What ends with a verdict is judged twice at most; but for
        what found no memory for its proof or its timing, after it was right where there was enough.
        """
        for left in reversed(range(_TRIES)):
            try:
                family, verdict, timed = self._judged_by(job)
                may_find_more = left == _TRIES - 1 or (left > 0 and _was_right(verdict))
                if not (may_find_more and self._is_for_want_of_memory(verdict) and self._device.has_neighbours):
                    break
            except NoMemory:
                if not left:
                    raise
            with job.clock.part(WAITED):  # by now nobody holds the frames of what failed
                self.references.give_way(job.tick, is_last=left == 1)
            job.clock.forget(0)
        return family, verdict, timed

    def _is_for_want_of_memory(self, verdict: Verdict) -> bool:
        """Whether others may be why: what finds none, or is wrong where there was too little, or too little to record
        it, since a library that finds less than it likes goes a way that rounds otherwise.
        """
        is_large = verdict.trust == OBSERVED and "memory" in verdict.trust_reason
        is_wrong = verdict.fault is Fault.INCORRECT and (is_large or self._is_short)
        return is_wrong or verdict.fault is Fault.OUT_OF_MEMORY

    def _family(self, problem: Problem, tick: Tick) -> Family:
        """A reference holds no foreign code. One that crashes may stand for a damaged sandbox, so that is replaced."""
        try:
            return self.references.get(problem, tick)
        except ProblemError as error:
            if isinstance(error.__cause__, CandidateFault) and error.__cause__.kind is Fault.ILLEGAL_ACCESS:
                self._zygote.replace()
            raise

    def _judged_by(self, job: _Job) -> tuple[Family, Verdict, Timing | None]:
        """:raises NoMemory: nothing is wrong with the candidate, nor with its reference."""
        with job.clock.hears(_OF_A_REFERENCE):
            family = self._family(job.problem, job.tick)
        job.clock.ends("reference")
        key = job.group, job.candidate.source
        known = family.timings.get(key) if job.timing and job.group else None
        equal, done = (known.timing, known.steps) if known is not None else (None, "")
        self._plan, self._is_short = "", False
        try:
            verdict, timed = self._on_all(
                family, msgspec.structs.replace(job, timing=job.timing and equal is None), equal
            )
            if equal is not None and verdict.fault is Fault.OK and self._steps(family, verdict) != done:
                # One source, which does now this and now that: the time of the one is none of the other.
                job.clock.forget(1)
                equal = None
                verdict, timed = self._on_all(family, job, None)
        except (CandidateFault, PermissionError, OSError) as error:
            # What is the candidate's has become its verdict: what arrives here is the reference's.
            self.references.drop(family.cases[0].reference)
            failed = f"the reference of {job.problem.problem_id} failed while it was used: {error}"
            if is_out_of_memory(error) and self._device.has_neighbours:
                raise NoMemory(
                    failed, "End the others on this GPU, or give each a timing_bench.memory_share"
                ) from error
            raise InfraError(failed) from error
        except InfraError:
            self.references.drop(family.cases[0].reference)
            raise
        if equal is not None and verdict.fault is Fault.OK:
            job.clock.ends("timing", Fault.OK, "of an equal kernel of its group")
            return family, verdict, equal
        if job.group and timed is not None and not timed.is_disturbed:
            kept = msgspec.structs.replace(timed, ratios=(), spent_s=0.0)
            family.timings[key] = KnownTiming(self._steps(family, verdict), kept)
        return family, verdict, timed

    def _steps(self, family: Family, verdict: Verdict) -> str:
        """What a kernel that was just judged was seen doing, as far as a digest says it: nothing of one that was only
        watched.
        """
        return f"{verdict.trust} {self._plan if len(family.cases) == 1 else ''}"

    def _options_for(self, job: _Job, equal: Timing | None, is_one: bool) -> BenchOptions:
        """`is_one`: of a problem with one workload."""
        is_interpreted = backend(job.candidate.backend).is_interpreted(self.options.device)
        options = options_for_interpreter(self.options) if is_interpreted else self.options
        if job.strictness is not None:
            options = msgspec.structs.replace(options, strictness=job.strictness)
        if job.verified is not None and is_one:
            options = msgspec.structs.replace(options, known=job.verified.plan)
        if (verifiers := self._device.verifiers) > 1:  # a kernel of a second takes as many, while all have slow ones
            floor, deadline = verifiers * options.call_floor_s, verifiers * options.deadline_s
            options = msgspec.structs.replace(options, call_floor_s=floor, deadline_s=deadline)
        is_spared = job.timing or (equal is not None and _is_clearly_slower(equal, options))
        return options if is_spared and job.group and is_one else msgspec.structs.replace(options, check_s=0.0)

    def _notice_restart(self) -> None:
        """References die with their zygote; they are made anew."""
        self._zygote.start()
        if self._zygote.generation != self._generation:
            self._generation = self._zygote.generation
            self.references.restart()

    def _on_all(self, family: Family, job: _Job, equal: Timing | None) -> tuple[Verdict, Timing | None]:
        """On every workload of the problem."""
        options = self._options_for(job, equal, len(family.cases) == 1)

        def settle(
            reference: Reference, options: BenchOptions, shared: Shared | None, timing: bool
        ) -> tuple[Verdict, Timing | None]:
            own = msgspec.structs.replace(job, timing=timing, clock=StageClock())
            found = self._settled(reference, own, options, shared)
            job.clock.add(own.clock)
            return found

        if len(family.cases) == 1:
            return settle(family.cases[0].reference, options, None, job.timing)
        return Several(family.cases, settle, options, self._rng, self._device.shares).run(job.timing)

    def _settled(
        self, reference: Reference, job: _Job, options: BenchOptions, shared: Shared | None
    ) -> tuple[Verdict, Timing | None]:
        known = len(job.clock.reports)

        def judged(is_alone: bool) -> tuple[Checker, Verdict, Timing | None]:
            job.clock.forget(known)
            checker = self._checker(reference, options, shared)
            return checker, *self._judge(checker, job, is_alone)

        def is_repeated(is_right: bool, is_alone: bool) -> bool:
            code = submitted(job.candidate, job.artifacts)
            return self._device.is_repeated(reference, code, options, is_right, is_alone)

        return settled(judged, is_repeated, self._device, options.alone_share, self._rng.random)

    def _checker(self, reference: Reference, options: BenchOptions, shared: Shared | None) -> Checker:
        def opens(code: Submission, is_alone: bool) -> Judged:
            return self._device.judged(reference, self._zygote, code, options, self._rng, is_alone)

        if shared is None:
            return Checker(self._zygote, reference, options, self._rng, opens)
        taken = shared.opens(reference, opens)
        return Checker(self._zygote, reference, options, self._rng, taken, shared.release)

    def _judge(self, checker: Checker, job: _Job, is_alone: bool) -> tuple[Verdict, Timing | None]:
        try:
            return self._through_stages(checker, job, is_alone)
        except CandidateFault as fault:
            if not self._is_hoarder(fault, checker):
                checker.accuse(fault)
            return verdict_of(checker), None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not self._is_hoarder(error, checker):
                raise NoMemory(f"no memory on {self.device} ({error})"[:300], "Give the bench more of it") from error
            return verdict_of(checker), None
        finally:
            both = checker.session, checker.reference.session
            is_short = any(one is not None and one.is_short for one in both)
            self._is_short = self._is_short or (is_short and self._device.is_crowded)
            pid = checker.session.host_pid if checker.session is not None else 0
            checker.close()
            if checker.fault is not None:
                self._device.ended(checker.fault, pid, self._zygote)
            # Its traceback holds frames that hold the checker, and so all of the reference's memory.
            checker.fault = None

    def _through_stages(self, checker: Checker, job: _Job, is_alone: bool) -> tuple[Verdict, Timing | None]:
        """Input sets, proof, timing, what watches, and what leaves the candidate unusable last."""
        verdict, timed, clock = self._on_sets(checker, job, is_alone), None, job.clock
        if verdict.fault is Fault.OK and checker.session is not None:
            self._plan = checker.session.plan
        if verdict.fault is Fault.OK and checker.is_proven:
            with clock.part("proof"):
                self._device.prove(checker, job.candidate, self.options, self._rng, job.tick)
            verdict = verdict_of(checker)
        if verdict.fault is Fault.OK and job.timing:
            verdict, timed = self._timed(checker, job, verdict)
            clock.ends("timing", verdict.fault)
        if checker.spared and not (timed is None or _is_clearly_slower(timed, checker.options)):
            checker.finish(self._after_a_set(checker, job))
            verdict = verdict_of(checker)
            clock.ends("full_inputs", verdict.fault, f"{verdict.passed} of {verdict.total} secret input sets")
        if verdict.fault is Fault.OK and job.watch is not None and checker.session is not None:
            place(checker.session, 0, checker.reference.sets[0])  # a measurement leaves zeros in new memory
            call = functools.partial(checker.session.call, wire.OP_RUN, 0, checker.one_call_s)
            call()
            job.watch(checker.session.host_pid, call)
        if verdict.fault is Fault.OK:  # also where its steps are known: what they are done to may differ
            self._device.prove_last(checker)
            verdict = verdict_of(checker)
        return verdict, timed if verdict.fault is Fault.OK else None

    def _on_sets(self, checker: Checker, job: _Job, is_alone: bool) -> Verdict:
        clock = job.clock
        with clock.part("its process"):
            checker.start(job.candidate, job.artifacts, is_alone)
        job.tick()
        checker.run(self._after_a_set(checker, job))
        verdict = verdict_of(checker)
        stage = "full_inputs" if clock.has("small_inputs") else "small_inputs"
        more = f", {checker.spared} more are for faster kernels" if checker.spared else ""
        clock.ends(stage, verdict.fault, f"{verdict.passed} of {verdict.total} secret input sets{more}")
        return verdict

    @staticmethod
    def _after_a_set(checker: Checker, job: _Job) -> Tick:
        def after() -> None:
            if not job.clock.has("small_inputs"):
                fault = Fault.INCORRECT if checker.failed else Fault.OK
                job.clock.ends("small_inputs", fault, "one secret input set")
            job.tick()

        return after

    def _is_hoarder(self, error: Exception, checker: Checker) -> bool:
        """Whether the candidate holds the memory that we or the reference lack; then that is its fault. It is ended,
        and the reference, which may have stopped halfway, is made anew. Nobody is asked about it once more: it had that
        memory in a process of its own, and a second one would be recorded on inputs of the reference that is gone.
        """
        session, reference = checker.session, checker.reference
        is_own = isinstance(error, CandidateFault) and error.by in (None, session)
        if session is None or is_own or not is_out_of_memory(error) or self._device.free() is None:
            return False
        with contextlib.suppress(CandidateFault, InfraError, RuntimeError):
            session.call(wire.OP_FREE, 0, checker.one_call_s)
        needed = reference.device_bytes + reference.far_bytes + reference.inside
        before = self._device.free() or 0
        told = self._device.held(session.host_pid)
        checker.close()
        fault = CandidateFault(Fault.OUT_OF_MEMORY, "it keeps so much memory of the GPU that none is left to judge it")
        self._device.ended(fault, session.host_pid, self._zygote)
        came_free = (self._device.free() or 0) - before
        self.references.drop(reference)
        if not is_hoarder(held_by_it(told, came_free, self._device.has_neighbours), needed):
            return False
        checker.fault, checker.is_shared = fault, False
        return True

    def _timed(self, checker: Checker, job: _Job, verdict: Verdict) -> tuple[Verdict, Timing | None]:
        peaks = self.peaks or self.measure_peaks()
        timed = self.measure(checker, job.tick, job.clock)
        if checker.fault is not None:
            return verdict_of(checker), None
        assert timed is not None
        floor = Floor(checker.reference, peaks, None if self.probe is None else self.measure_peaks)
        if timed.speedup <= self.options.recipe.suspicious and not floor.is_beaten_by(timed):
            return verdict, floor.noted(timed)
        checker.restart()
        again = None if checker.fault else self.measure(checker, job.tick, job.clock)
        if again is None:
            return verdict_of(checker), None
        if proof := floor.evidence(timed, again):
            checker.fault = CandidateFault(Fault.CHEATING, proof, RULE)
            return verdict_of(checker), None
        return verdict, floor.noted(min(timed, again, key=lambda t: t.speedup))

    def measure_peaks(self) -> Peaks | None:
        """The best that was ever measured here; None where nothing can be measured now."""
        if self.probe is None:
            return None
        self.settle()
        with self.quiet():
            found = self.probe()
        if found is not None:
            self.peaks = found = better(found, self.peaks)
        return found

    def measure(self, checker: Checker, tick: Tick, clock: StageClock) -> Timing | None:
        reference = checker.reference
        with clock.part("a twin of the reference"):
            twin = reference.twin(self._zygote, checker.is_replayed)
        stopwatch = self._device.stopwatch(checker, twin, checker.options, self._rng, tick)
        try:
            with ExitStack() as window:
                with clock.part("preparing"):
                    ready()  # not in the window: others stand still in it
                    stopwatch.prepare()
                with clock.part("until all is quiet"):
                    window.enter_context(self.quiet())
                with clock.part("measuring"):
                    timed = stopwatch.run()
            self._device.refuse_short(checker)
            return timed
        finally:
            stopwatch.close()
            reference.release(twin)


def _was_right(verdict: Verdict) -> bool:
    """On all sets, before it found no memory."""
    return verdict.fault is Fault.OUT_OF_MEMORY and 0 < verdict.passed == verdict.total


def _is_clearly_slower(timed: Timing, options: BenchOptions) -> bool:
    """Whether how much slower it is earns little (`Recipe.enough_below`)."""
    return not timed.is_disturbed and timed.hi < options.recipe.enough_below
