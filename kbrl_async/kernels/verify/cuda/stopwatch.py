"""Timing a correct candidate on a GPU, in the process that was just checked, against its reference's child.

::

    fresh mixtures ─▶ both arenas (all slots of a batch) ─▶ in random order, each child alone:
        flush L2 ─▶ event ─▶ forward × batch ─▶ event ─▶ wait for the device ─▶ copy outputs out      (our wall: all)
    ─▶ both frozen: every output of every slot compared here, on the GPU

Two ways, always the same for both sides: `graph`, where no Python runs while the clock does, and `event`, one ordinary
forward, where a forward can't be captured.

Invariants
* A child's times are claims. What its calls take by our own clock, beyond what it claims, must be the same as for the
  reference, which does the same around its forward: work after the call or under a forged clock shows there.
* Work on any stream counts: a graph holds all of it or none, an ordinary forward ends when every stream has ended.
* Both sides get the same values behind pointers of their own, new values in every call.
* Where a measurement goes on in other memory (`Recipe.pairs_a_place`), the candidate launches there what it launched
  when its kernels were looked at.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import torch

from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.timing import Interval, Measured, Pair, Recipe, measure
from kbrl_async.kernels.timing.cuda.calibration import SHARED_NS, Calibration, Steady
from kbrl_async.kernels.timing.cuda.clocks import Observation, observe
from kbrl_async.kernels.timing.cuda.nvml import Nvml, is_rejected
from kbrl_async.kernels.timing.recipe import Point, as_disturbed
from kbrl_async.kernels.verify.checks import DEGENERATE_NOTE, Checker
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.claims import Claims
from kbrl_async.kernels.verify.cuda.device_places import Looks
from kbrl_async.kernels.verify.cuda.own_kernels import CapturedKernels
from kbrl_async.kernels.verify.cuda.session import TimedCall, TimedSide
from kbrl_async.kernels.verify.cuda.sides import CAPTURE_S, Sides
from kbrl_async.kernels.verify.hoarding import NoMemory, tells_of_memory
from kbrl_async.kernels.verify.options import BenchOptions, Tick
from kbrl_async.kernels.verify.report import timing_of
from kbrl_async.kernels.verify.session import CandidateFault, Session
from protocols.records import Candidate, Fault, Timing

_FLOOR_NS = 50.0
_HIDDEN_NS = 30_000.0
"""Two processes' calls differ by up to this much anyway."""
_CLOCK_EVERY = 4
_PATIENCE_S = 0.5
_FEW, _ENOUGH_ABOVE = (2, 3, 4), 1.3
_LONG_CALL_NS = 5e6
"""A call this long needs no warm-up after those that were checked, and one pair tells how much slower it is."""
_MOST_APART_S, _BEATS = 60.0, 3
_UNSEEN_PAIRS = 2
_LEFT_OUT = 0.05
"""Of the pairs of what is replayed: before them runs one that looks like any other, without one of its slots."""
_ELSEWHERE = "captured once more, forward launches other kernels than before: it acts by phase"
_BALLAST = 64 << 20
"""At most so many bytes lie between two places, held until the end."""
RESOLVED = (
    Point(0.0013, 0.05),
    Point(0.0035, 0.008),
    Point(0.025, 0.011),
    Point(0.033, 0.0045),
    Point(0.13, 0.004),
    Point(1.4, 0.002),
)
"""What A against A could not resolve by length, on two H200s; `kbrl bench --aa` measures a host's own."""


class CudaStopwatch:
    """`run` gives None and sets `checker.fault` where a timed call fails, is wrong or contradicts our clock."""

    def __init__(
        self,
        checker: Checker,
        twin: Session,
        options: BenchOptions,
        rng: random.Random,
        tick: Tick,
        nvml: Nvml | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self._checker, self._options, self._rng, self._tick = checker, options, rng, tick
        self._sides = Sides(checker, twin, rng, Looks(self._is_alone, lambda: self._wait_for_others(_BEATS)))
        self._claims = Claims(checker, self._sides)
        self._slot = self._pairs = 0
        self._apart_s = 0.0
        """Seconds that are not charged to the measurement's cap."""
        self._kernels: dict[str, int] = {}
        self._ballast: list[DeviceArena] = []
        self._moved: TimedSide = self._sides.reference if rng.random() < 0.5 else self._sides.candidate
        self._nvml, self._seen = nvml, list[Observation]()
        self._calibration, self._faults = calibration, Counter[str]()
        self._steady = Steady(None if nvml is None else nvml.max_sm_mhz())

    def close(self) -> None:
        self._sides.keep_freed(False)
        with contextlib.suppress(CudaError, NoMemory):  # it stays as it is then
            self._sides.places.leave()
        while self._ballast:
            self._ballast.pop().close()

    def prove(self, candidate: Candidate) -> None:
        """Whether the candidate's own kernels make its outputs; sets `checker.fault` and `checker.evidence`."""
        if not backend(candidate.backend).needs_own_kernels:
            return
        try:
            captured = self._sides.capture()
            self._tick()
            finding = CapturedKernels(self._checker, self._sides).finding(captured, candidate)
            if finding is not None:
                self._checker.evidence = finding.evidence
                raise CandidateFault(finding.fault, finding.text, finding.rule)
            if self._sides.nominal.degenerate:
                self._checker.evidence += f"; {DEGENERATE_NOTE}"
        except CandidateFault as fault:
            self._checker.accuse(fault)

    def prepare(self) -> None:
        """All that needs nobody else to stand still, and a run of both that does not count."""
        try:
            self._tick()
            if not self._checker.reference.keeps_sets:
                torch.cuda.empty_cache()  # of its proof: both sides are captured next
            self._kernels = self._sides.capture().kernels
            self._warm_up()
            if not self._sides.refused:
                self._sides.candidate.leaves_out(self._sides.limit_s)
        except CandidateFault as fault:
            self._checker.accuse(fault)

    def run(self) -> Timing | None:
        if self._checker.fault is not None:
            return None
        try:
            self._wait_for_others()
            recipe = _recipe(self._options.recipe, not self._sides.refused)
            if self._sides.places.takes_turns:
                self._sides.places.watches = True
                recipe = recipe if self._calibration is not None else _unseen(recipe)
            measured = measure(self._pair, recipe, lambda: time.monotonic() - min(self._apart_s, _MOST_APART_S))
            with span("audited"):
                self._claims.audit()
            self._sides.bring(self._sides.candidate)  # whoever watches it next finds its memory there
        except CandidateFault as fault:
            self._checker.accuse(fault)
            return None
        if self._claims.is_disturbed:
            measured = as_disturbed(measured)
        return self._timing(_with_hidden(measured, self._claims.hidden))

    # ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self) -> None:
        """Both know the cost of two events with nothing in between; the smaller one is taken from both."""
        sides, candidate, limit = self._sides, self._sides.candidate, self._sides.limit_s
        both = (sides.reference, candidate)
        sides.keep_freed(bool(sides.refused))
        sides.park()
        sides.fill(list(range(sides.plan.slots if sides.refused else sides.batch)))
        is_warm = candidate.is_trusted and _LONG_CALL_NS <= candidate.forward_ns < math.inf
        empties = []
        for session in both:
            sides.bring(session)
            if not (sides.refused or (is_warm and session is candidate)):
                session.replay(1 if candidate.is_trusted else 2, 4 * limit)
            empties.append((session.event if sides.refused else session.replay)(0, limit).empty_ns)
        self._empty: float = min(empties)

    def _wait_for_others(self, in_a_row: int = 1) -> bool:
        """A process that stands still leaves its last kernel behind, which may be a long one. Whether it has ended, as
        so many looks in a row say.
        """
        if self._calibration is None:
            return False
        end, found = time.monotonic() + _PATIENCE_S, 0
        while found < in_a_row:
            found = found + 1 if self._is_alone() else 0
            if found < in_a_row and time.monotonic() >= end:
                return False
        return True

    def _is_alone(self) -> bool:
        """Nobody can know without a kernel that looks: then no pair of two that take turns counts."""
        if self._calibration is None:
            return False
        beat = self._calibration.beat()
        return beat.host_ns <= beat.ns + SHARED_NS

    def _pair(self) -> Pair:
        self._tick()
        every, places = self._options.recipe.pairs_a_place, self._sides.places
        if every and self._pairs and self._pairs % every == 0 and not places.takes_turns:
            self._move()  # who takes turns has other memory in each call
        self._pairs += 1
        places.was_busy()  # what was seen before this pair
        if self._rng.random() < _LEFT_OUT and self._sides.candidate.is_trusted:  # only what is replayed leaves any out
            self._sides.fill(list(range(self._sides.batch)))
            self._sides.candidate.leaves_out(self._sides.limit_s)
        count = 1 if self._sides.refused else self._sides.batch
        self._slot = (self._slot + 1) % self._sides.plan.slots if self._sides.refused else 0
        slots = list(range(self._slot, self._slot + count))
        with span("pairs: filled"), self._apart():
            self._sides.park()
            self._sides.fill(slots)
        sides: list[TimedSide] = [self._sides.reference, self._sides.candidate]
        self._rng.shuffle(sides)
        with span("pairs: run"):
            samples = {id(side): self._sample(side) for side in sides}
        with span("pairs: compared"), self._apart():
            self._sides.check(self._slot, count)
        reference, candidate = samples[id(self._sides.reference)], samples[id(self._sides.candidate)]
        self._claims.note(reference, candidate)
        net = self._net(reference, count), self._net(candidate, count)
        with span("pairs: clock"):
            mhz, fault = self._clock()
        if places.was_busy():
            fault = fault or "shared"
        self._faults[fault] += bool(fault)
        return Pair(*net, waited=float(fault == "shared"), polluted=bool(fault), mhz=mhz)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What is done between the calls of a problem whose inputs are drawn anew each time takes seconds: charged to
        the cap, it would leave two pairs, whose interval says nothing.
        """
        begun = time.monotonic()
        yield
        if not self._checker.reference.keeps_sets:
            self._apart_s += time.monotonic() - begun

    def _move(self) -> None:
        """Other memory for one side's inputs and outputs, in turns: where they lie is a bias of its own."""
        size = self._rng.randint(1, _BALLAST)
        with contextlib.suppress(CudaError):  # without room it changes places all the same
            self._ballast.append(DeviceArena.new(size, torch.device(self._options.device)))
        self._moved = self._sides.candidate if self._moved is self._sides.reference else self._sides.reference
        self._checker.reference.attach(self._moved)
        if self._sides.refused:
            return
        captured = self._moved.capture(self._sides.batch, CAPTURE_S + self._sides.limit_s)
        if tells_of_memory(captured.refused):
            raise NoMemory(f"no memory for another graph of forward ({captured.refused})"[:300])
        if self._moved is self._sides.candidate and (captured.refused or captured.kernels != self._kernels):
            self._checker.evidence = captured.refused or f"{sorted(self._kernels)}, then {sorted(captured.kernels)}"
            raise CandidateFault(Fault.CHEATING, _ELSEWHERE, "phase")

    def _clock(self) -> tuple[float | None, str]:
        """The clock right after a pair, and why the pair must be set aside; from inside, where our kernel runs."""
        seen = self._observed()
        fault = "throttled" if seen is not None and is_rejected(seen.bits) else ""
        if self._calibration is None:
            return (None if seen is None else seen.mhz), fault
        beat = self._calibration.beat()
        return beat.mhz, self._steady.fault(beat) or fault

    def _observed(self) -> Observation | None:
        """What the driver says, now and then: asking takes longer than a short call."""
        if self._nvml is None or len(self._claims) % _CLOCK_EVERY:
            return None
        self._seen.append(observe(self._nvml))
        return self._seen[-1]

    def _net(self, sample: TimedCall, count: int) -> float:
        return max(_FLOOR_NS, sample.elapsed_ns - self._empty) / count

    def _sample(self, session: TimedSide) -> TimedCall:
        with self._apart():
            self._sides.bring(session)
        # Of the reference, too: both find the GPU as the same work of ours left it.
        session.poison(None if self._sides.refused else self._sides.batch)
        limit = self._sides.limit_s
        told = session.event(self._slot, limit) if self._sides.refused else session.replay(1, limit)
        self._sides.places.look()  # what it left behind: a move would wait for that
        return told

    def _timing(self, measured: Measured) -> Timing:
        empty = f"{self._empty / 1000:.1f} µs of empty events subtracted"
        refused, hidden, count = self._sides.refused, self._claims.hidden, self._sides.batch
        if refused:
            way = f"events around an ordinary forward ({refused}), {hidden / 1000:.0f} µs outside of them"
        else:
            way = f"CUDA graph of {count} forward{'s' if count > 1 else ''}"
        reasons = "".join(f", {count} {reason}" for reason, count in sorted(self._faults.items()) if count)
        method = f"paired, cold L2, {way}, {empty}, {measured.rejected} rejected{reasons}"
        chip = torch.cuda.get_device_name(torch.device(self._options.device))
        timing = timing_of(measured, self._options.recipe, method, chip, measured.mhz)
        throttle = sorted({reason for seen in self._seen for reason in seen.throttle})
        return msgspec.structs.replace(timing, throttle=throttle)


def _recipe(recipe: Recipe, is_graph: bool) -> Recipe:
    """With what a GPU bench resolves, where nobody has measured it on this host; 0 says that nothing is to be added. In
    training it is looked at as soon as there is something to see: after two to four pairs for what is clear, else after
    nine. None is warm-up where graphs are timed, because both sides have just run (`prepare`).
    """
    if recipe.enough_below:
        recipe = msgspec.structs.replace(
            recipe,
            warmup=0 if is_graph else min(recipe.warmup, 1),
            looks=min(recipe.looks, 3),
            few=_FEW,
            lone_ms=_LONG_CALL_NS / 1e6,
            enough_above=_ENOUGH_ABOVE,
        )
    if recipe.resolved or recipe.placement == 0:
        return recipe
    return msgspec.structs.replace(recipe, resolved=RESOLVED)


def _unseen(recipe: Recipe) -> Recipe:
    """None of its pairs counts, and others stand still meanwhile: as few as there may be."""
    return msgspec.structs.replace(recipe, reject_cap=1, max_pairs=_UNSEEN_PAIRS)


def _with_hidden(measured: Measured, hidden_ns: float) -> Measured:
    """Time that lies outside of a candidate's events is its time all the same."""
    more = max(0.0, hidden_ns - _HIDDEN_NS) / 1e6
    factor = measured.candidate_ms / (measured.candidate_ms + more)
    inside = measured.interval
    interval = Interval(inside.median * factor, inside.lo * factor, inside.hi * factor)
    return msgspec.structs.replace(measured, interval=interval, candidate_ms=measured.candidate_ms + more)
