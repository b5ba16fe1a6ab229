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
import statistics
import time
from collections import Counter

import msgspec
import torch

from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.timing import Interval, Measured, Pair, Recipe, measure
from kbrl_async.kernels.timing.cuda.calibration import SHARED_NS, Calibration, Steady
from kbrl_async.kernels.timing.cuda.clocks import Observation, observe
from kbrl_async.kernels.timing.cuda.nvml import Nvml, is_rejected
from kbrl_async.kernels.timing.recipe import Point
from kbrl_async.kernels.verify import compare, proof, wire
from kbrl_async.kernels.verify.checks import DEGENERATE_NOTE, Checker
from kbrl_async.kernels.verify.cpu.trace import BEFORE
from kbrl_async.kernels.verify.cuda import proof as cuda_proof
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.reference import CudaReference, ReferencePlan
from kbrl_async.kernels.verify.cuda.replay.session import ReplaySession
from kbrl_async.kernels.verify.cuda.session import CudaSession, TimedCall, TimedSide
from kbrl_async.kernels.verify.layouts import is_answer
from kbrl_async.kernels.verify.options import BenchOptions, Tick
from kbrl_async.kernels.verify.report import clean, timing_of
from kbrl_async.kernels.verify.session import FORGED, CandidateFault, Session
from kbrl_async.kernels.verify.sets import tensors_of
from protocols.records import Candidate, Fault, Timing

_FLOOR_NS = 50.0
_SLOW, _SHORT_NS, _SLOW_BATCH_NS = 2.0, 150_000.0, 2_400_000.0
"""A forward shorter than the second is not told from a slow one by the time of a call."""
_AUDIT_NS = 5e6
_LONG_NS = 1_500_000.0
"""A batch this long is audited well enough by the calls that timed it."""
_EXTRA_SHARE, _EXTRA_NS = 0.10, 20_000.0
_EVENT_SHARE, _EVENT_NS = 0.25, 60_000.0
_HIDDEN_NS = 30_000.0
"""Two processes' calls differ by up to this much anyway."""
_MAX_REASON = 200
_ORDINARY_NS = 400_000.0
"""What an ordinary forward takes with its flushes."""
_CAPTURE_S = 10.0
_LOOKS = 6
"""At most, at the share of own kernels, before too small a one is held against a candidate."""
_CLOCK_EVERY = 4
_PATIENCE_S = 0.5
_FEW, _ENOUGH_ABOVE = (2, 3, 4), 1.3
_LONG_CALL_NS = 5e6
"""A call this long needs no warm-up after those that were checked, and one pair tells how much slower it is."""
_STRETCH = 1 << 23
"""Elements that are compared of a tensor of a timed call, where nothing can know that it is one."""
_LOOKED_AT = 256 << 20
"""Bytes of inputs and outputs of a timed call."""
_LEFT_OUT = 0.05
"""Of the pairs of what is replayed: before them runs one that looks like any other, without one of its slots."""
_TRUSTED_NS = 50_000.0
"""Allowed beside the claims of a process that no candidate's host code runs in, before longer calls are taken."""
_BESIDE_RATIO = 1.5
_ELSEWHERE = "captured once more, forward launches other kernels than before: it acts by phase"
_BALLAST = 64 << 20
"""At most so many bytes lie between two places, held until the end."""
_IN_A_ROW = "calls that follow each other give wrong results, each alone is right: a race, or state that is left behind"
_BESIDE = "a replay gives another result: it launches on another stream than torch's current one, or acts by phase"
RESOLVED = (
    Point(0.0013, 0.05),
    Point(0.0035, 0.008),
    Point(0.025, 0.011),
    Point(0.033, 0.0045),
    Point(0.13, 0.004),
    Point(1.4, 0.002),
)
"""What A against A could not resolve by length, on two H200s; `kbrl bench --aa` measures a host's own."""


def batch_for(plan: ReferencePlan, reference_ns: float, candidate_ns: float) -> int:
    """Forwards in one timed run. Of a candidate that is clearly slower than its reference fewer, a power of two: how
    much slower it is needs no precision.

    >>> batch_for(Plan(16, 16), 40_000.0, 60_000.0), batch_for(Plan(16, 16), 40_000.0, 1_000_000.0)
    (16, 4)
    """
    if candidate_ns < _SLOW * max(reference_ns, _SHORT_NS) or not math.isfinite(candidate_ns):
        return plan.batch
    enough = math.ceil(_SLOW_BATCH_NS / candidate_ns)
    return min(plan.batch, 1 << (enough - 1).bit_length())


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
        assert isinstance(checker.reference, CudaReference)
        assert isinstance(twin, CudaSession)
        assert isinstance(checker.session, TimedSide)
        self._checker, self._options, self._rng, self._tick = checker, options, rng, tick
        self._plan, self._pool = checker.reference.plan, checker.reference.pool
        self._slot_bytes = checker.reference.slot_bytes
        self._nominal = checker.reference.sets[0]
        self._reference: TimedSide = twin
        self._candidate: TimedSide = checker.session
        self._limit_s = checker.one_call_s
        self._batch = batch_for(self._plan, checker.reference.forward_ns, checker.session.forward_ns)
        if self._candidate.is_kept:
            self._batch = 1
        self._outside: list[tuple[float, float]] = []
        """What the calls of a pair took beyond their claims: the candidate's, the reference's."""
        self._claims: list[float] = []
        self._slot = self._pairs = 0
        self._refused = ""
        self._kernels: dict[str, int] = {}
        self._ballast: list[DeviceArena] = []
        self._moved: TimedSide = self._reference if rng.random() < 0.5 else self._candidate
        self._hidden = 0.0
        self._beside: list[tuple[float, float]] = []
        self._nvml, self._seen = nvml, list[Observation]()
        self._calibration, self._faults = calibration, Counter[str]()
        self._steady = Steady(None if nvml is None else nvml.max_sm_mhz())

    def close(self) -> None:
        while self._ballast:
            self._ballast.pop().close()

    def prove(self, candidate: Candidate) -> None:
        """Whether the candidate's own kernels make its outputs; sets `checker.fault` and `checker.evidence`."""
        try:
            captured = self._capture()
            self._tick()
            if not backend(candidate.backend).needs_own_kernels:
                return
            finding = self._own_kernels(captured, candidate) or self._own_backward()
            if finding is not None:
                self._checker.evidence = finding.evidence
                raise CandidateFault(finding.fault, finding.text, finding.rule)
            if self._nominal.degenerate:
                self._checker.evidence += f"; {DEGENERATE_NOTE}"
        except CandidateFault as fault:
            self._checker.accuse(fault)

    def prepare(self) -> None:
        """All that needs nobody else to stand still, and a run of both that does not count."""
        try:
            self._tick()
            self._kernels = self._capture().kernels
            self._warm_up()
            if not self._refused:
                self._candidate.leaves_out(self._limit_s)
        except CandidateFault as fault:
            self._checker.accuse(fault)

    def run(self) -> Timing | None:
        if self._checker.fault is not None:
            return None
        try:
            self._wait_for_others()
            measured = measure(self._pair, _recipe(self._options.recipe, not self._refused))
            with span("audited"):
                self._audit()
        except CandidateFault as fault:
            self._checker.accuse(fault)
            return None
        return self._timing(_with_hidden(measured, self._hidden))

    def _capture(self) -> wire.Captured:
        count, limit = self._batch, _CAPTURE_S + self._limit_s
        reference = self._reference.capture(count, max(limit, 60.0))
        captured = self._candidate.capture(count, limit)
        refused = captured.refused or (f"the reference: {reference.refused}" if reference.refused else "")
        self._refused = clean(refused)[:_MAX_REASON]
        if self._refused or self._candidate.is_proven:
            return captured
        is_one = count == 1 and self._candidate.is_trusted  # the calls that were checked; timed ones are, too
        if not is_one and not self._replays_rightly():
            if self._candidate.is_trusted:
                raise CandidateFault(Fault.INCORRECT, _IN_A_ROW, "wrong_when_timed")
            self._refused = _BESIDE
            captured = msgspec.structs.replace(captured, refused=_BESIDE)
        self._candidate.is_proven = self._candidate.is_trusted
        return captured

    def _replays_rightly(self) -> bool:
        """Whether a replay does what a call does: kernels launched on another stream are no part of the graph."""
        count = self._batch
        self._fill(list(range(count)))
        self._candidate.poison()
        for session in (self._reference, self._candidate):
            session.replay(1, 4 * self._limit_s)
        return self._is_right(self._candidate.outputs(0, count), self._reference.outputs(0, count)).wrong == 0

    # ── whose kernels ───────────────────────────────────────────────────────────────────────────────────────────────

    def _own_kernels(self, captured: wire.Captured, candidate: Candidate) -> proof.Finding | None:
        if captured.refused:
            return self._launches()
        names, session = captured.kernels, self._candidate
        own = session.own_kernels(candidate.source)
        if isinstance(session, ReplaySession) and not own:
            return proof.of_recorded(session.trace, has_times=False)
        if not own:  # `<<<…>>>` without a stream is launched beside any capture: look at what was launched
            return self._launches()
        self._checker.evidence = cuda_proof.evidence(names, own)
        if isinstance(session, ReplaySession) and len(own) == len(names):  # without them nothing runs at all
            self._checker.own_share, self._checker.evidence = 1.0, cuda_proof.evidence(names, own, 1.0)
            return None
        whole = left = math.inf
        for _ in range(_LOOKS):  # others' work is in these times, too, on either side: the least of each holds
            whole_ns, left_ns, is_right, answered = self._without(own)
            whole, left = min(whole, whole_ns), min(left, left_ns)
            self._checker.evidence = cuda_proof.evidence(names, own, cuda_proof.own_share(whole, left))
            if isinstance(session, ReplaySession):  # who is observed can answer for its parts as it likes
                self._checker.own_share = cuda_proof.told_share(names, own, whole, left)
            if (found := proof.of_muted(wire.Trace(answered=answered), is_right)) is not None:
                return found
            if (finding := cuda_proof.of_share(names, own, whole, left)) is None:
                return None
        return finding

    def _own_backward(self) -> proof.Finding | None:
        """Where gradients are asked for, of a replay: are they right without the own kernels of the backward? Those are
        all that are launched once upstream gradients have been read.
        """
        session, reference = self._candidate, self._checker.reference
        if not (reference.declared.backward and isinstance(session, ReplaySession)) or self._nominal.degenerate:
            return None
        behind = session.own_behind(tensors_of(reference.tree, len(reference.tree[1]) - 1))
        if behind is None:
            return None
        if not behind:
            return msgspec.structs.replace(proof.of_backward(False), fault=Fault.UNPROVEN)
        self._fill([0])
        expected = [output.unsqueeze(0) for output in self._expected_of_slot_0()]
        session.without(behind, self._limit_s)
        is_right = self._is_right(session.outputs(0, 1), expected).wrong == 0
        return proof.of_backward(True) if is_right else None

    def _launches(self) -> proof.Finding | None:
        """As on a CPU, where a forward can't be captured: what the launchers counted, and a call without launches."""
        self._fill([0])
        limit, candidate = self._limit_s, self._candidate
        trace = candidate.call(wire.OP_TRACE, 0, limit).trace
        assert trace is not None, "a call that is to be told of is, or is refused"
        found = proof.of_recorded(trace, has_times=False)
        if found is not None:
            return found
        self._checker.evidence = proof.evidence(trace)
        self._fill([0])
        expected = self._expected_of_slot_0()
        try:
            muted = candidate.call(wire.OP_MUTED, 0, 2 * limit)
            is_right = self._is_right(self._checker.outputs(muted), expected).wrong == 0
            is_right = is_right and not self._nominal.degenerate  # poison may be right there, too
        except CandidateFault as fault:
            if fault.rule == FORGED:
                raise
            return None  # it needs its kernels, which is all that is asked here
        return proof.of_muted(without_chance(muted.trace) if self._nominal.degenerate else muted.trace, is_right)

    def _expected_of_slot_0(self) -> list[torch.Tensor]:
        outcome = self._reference.call(wire.OP_RUN, 0, self._limit_s)
        return [self._reference.read(meta) for meta in outcome.tensors]

    def _without(self, own: list[str]) -> tuple[float, float, bool, str]:
        """Times with and without the own kernels, whether the outputs are right without them, and the operator whose
        result already is an output.
        """
        expected: list[torch.Tensor] = []

        def draw() -> None:
            self._fill([0])
            expected[:] = [output.unsqueeze(0) for output in self._expected_of_slot_0()]

        def renew() -> None:
            if self._nominal.mutated:
                draw()

        draw()
        self._candidate.poison()
        whole, left = self._candidate.muted(own, 10 * self._limit_s, renew)
        is_right = self._is_right(self._candidate.outputs(0, 1), expected).wrong == 0 and not self._nominal.degenerate
        return (
            whole,
            left,
            is_right,
            "" if is_right else self._candidate.answered(lambda got: self._is_one(got, expected)),
        )

    def _is_one(self, got: torch.Tensor, expected: list[torch.Tensor]) -> bool:
        """Whether a tensor holds all values of an output, in whatever order and shape."""
        for wanted, tolerance in zip(expected, self._nominal.tolerances, strict=True):
            if got.numel() == wanted.numel() == 1 and is_answer(got, wanted.to(got.device)):
                return True
            if got.numel() == wanted.numel() > 1 and wanted.is_floating_point() and got.is_floating_point():
                a, b = got.flatten().to(wanted.dtype), wanted.flatten()
                if compare.difference(a, b, tolerance).wrong == 0:
                    return True
                # sorting takes several times their memory: first whether the least and the largest may be the same
                ends = [torch.stack(one.aminmax()) for one in (a, b)]
                is_near = compare.difference(ends[0], ends[1], tolerance).wrong == 0
                if is_near and compare.difference(a.sort()[0], b.sort()[0], tolerance).wrong == 0:
                    return True
        return False

    # ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, slots: list[int]) -> None:
        """The same fresh values in both arenas."""
        for slot in slots:
            places = [self._reference.slots[slot], self._candidate.slots[slot]]
            self._rng.shuffle(places)
            self._pool.mix(places, self._rng)

    def _warm_up(self) -> None:
        """Both know the cost of two events with nothing in between; the smaller one is taken from both."""
        both = (self._reference, self._candidate)
        self._fill(list(range(self._plan.slots if self._refused else self._batch)))
        if self._refused:
            empties = [s.event(0, self._limit_s).empty_ns for s in both]
        else:
            is_warm = self._candidate.is_trusted and _LONG_CALL_NS <= self._candidate.forward_ns < math.inf
            for session in both[:1] if is_warm else both:
                session.replay(1 if self._candidate.is_trusted else 2, 4 * self._limit_s)
            empties = [s.replay(0, self._limit_s).empty_ns for s in both]
        self._empty: float = min(empties)

    def _wait_for_others(self) -> None:
        """A process that stands still leaves its last kernel behind, which may be a long one."""
        end = time.monotonic() + _PATIENCE_S
        while self._calibration is not None and time.monotonic() < end:
            beat = self._calibration.beat()
            if beat.host_ns <= beat.ns + SHARED_NS:
                return

    def _pair(self) -> Pair:
        self._tick()
        every = self._options.recipe.pairs_a_place
        if every and self._pairs and self._pairs % every == 0:
            self._move()
        self._pairs += 1
        if self._rng.random() < _LEFT_OUT:
            self._fill(list(range(self._batch)))
            self._candidate.leaves_out(self._limit_s)
        count = 1 if self._refused else self._batch
        self._slot = (self._slot + 1) % self._plan.slots if self._refused else 0
        slots = list(range(self._slot, self._slot + count))
        with span("pairs: filled"):
            self._fill(slots)
        sides: list[TimedSide] = [self._reference, self._candidate]
        self._rng.shuffle(sides)
        with span("pairs: run"):
            samples = {id(side): self._sample(side) for side in sides}
        with span("pairs: compared"):
            self._compare(self._slot, count)
        reference, candidate = samples[id(self._reference)], samples[id(self._candidate)]
        self._outside.append((candidate.wall_ns - candidate.elapsed_ns, reference.wall_ns - reference.elapsed_ns))
        self._claims.append(max(candidate.elapsed_ns, reference.elapsed_ns))
        self._beside.append((candidate.elapsed_ns, candidate.stream_ns))
        net = self._net(reference, count), self._net(candidate, count)
        with span("pairs: clock"):
            mhz, fault = self._clock()
        self._faults[fault] += bool(fault)
        return Pair(*net, waited=float(fault == "shared"), polluted=bool(fault), mhz=mhz)

    def _move(self) -> None:
        """Other memory for one side's inputs and outputs, in turns: where they lie is a bias of its own."""
        size = self._rng.randint(1, _BALLAST)
        with contextlib.suppress(CudaError):  # without room it changes places all the same
            self._ballast.append(DeviceArena.new(size, torch.device(self._options.device)))
        self._moved = self._candidate if self._moved is self._reference else self._reference
        self._checker.reference.attach(self._moved)
        if self._refused:
            return
        captured = self._moved.capture(self._batch, _CAPTURE_S + self._limit_s)
        if self._moved is self._candidate and (captured.refused or captured.kernels != self._kernels):
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
        # Of the reference, too: both find the GPU as the same work of ours left it.
        session.poison(None if self._refused else self._batch)
        slot = self._slot
        return session.event(slot, self._limit_s) if self._refused else session.replay(1, self._limit_s)

    def _compare(self, first: int, count: int) -> None:
        end = first + count
        begin, stop = self._looked_at(first, end)
        got, expected = self._candidate.outputs(begin, stop), self._reference.outputs(begin, stop)
        if self._candidate.is_trusted:
            got, expected = self._sampled(got, expected)
        if not self._agree(got, expected) and (found := self._is_right(got, expected)).wrong:
            text = f"{found.wrong} of {found.total} values of a timed call are wrong; the checked calls were right"
            # Of what is replayed nobody knows that it is timed: a race, or what a kernel left behind in its module.
            fault = Fault.INCORRECT if self._candidate.is_trusted else Fault.CHEATING
            raise CandidateFault(fault, text, "wrong_when_timed")
        slot = self._rng.randrange(first, end)
        inputs = self._reference.slots[slot], self._candidate.slots[slot]
        for ours, theirs in zip(*(self._sampled(*inputs) if self._candidate.is_trusted else inputs), strict=True):
            if not self._nominal.mutated and not compare.same_values(ours, theirs):
                raise CandidateFault(Fault.CHEATING, "an input was changed by a timed call", "input_mutation")

    def _looked_at(self, first: int, end: int) -> tuple[int, int]:
        """All slots of a call. Of very large ones that are replayed, where nothing can know whether it is timed, a
        secret one: comparing them all would take longer than they did.
        """
        if not self._candidate.is_trusted or (end - first) * self._slot_bytes <= _LOOKED_AT:
            return first, end
        slot = self._rng.randrange(first, end)
        return slot, slot + 1

    def _sampled(
        self, first: list[torch.Tensor], second: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of large tensors the same secret stretch of both."""
        pairs = [self._stretch(*pair) for pair in zip(first, second, strict=True)]
        return [one for one, _ in pairs], [other for _, other in pairs]

    def _stretch(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = one.numel()
        if count <= _STRETCH or not (one.is_contiguous() and other.is_contiguous()):
            return one, other
        begin = self._rng.randrange(1 - _STRETCH, count)  # beyond both ends, so that they are as likely as the middle
        part = slice(max(0, begin), begin + _STRETCH)
        return one.view(-1)[part], other.view(-1)[part]

    def _agree(self, got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        return all(map(compare.agrees, got, expected, self._nominal.tolerances))

    def _is_right(self, got: list[torch.Tensor], expected: list[torch.Tensor]) -> compare.Difference:
        return self._checker.compare(got, expected, self._nominal.tolerances)

    # ── our clock against its claims ────────────────────────────────────────────────────────────────────────────────

    def _audit(self) -> None:
        """What the candidate's calls take beyond their claims, against what the reference's take. A first suspicion is
        looked into with longer calls: a noisy host must not make a cheat of anybody.
        """
        if self._refused:
            self._refuse_side_stream()
        claim = statistics.median(self._claims)
        extra = statistics.median(ours - theirs for ours, theirs in self._outside)
        allowed = _EXTRA_SHARE * claim + _EXTRA_NS
        if self._refused:
            allowed = _EVENT_SHARE * claim + _EVENT_NS
            extra = self._hidden = self._repeated(claim, _AUDIT_NS)
        elif self._candidate.is_trusted:
            ours, theirs = map(min, zip(*self._outside, strict=True))  # of two or three pairs one may be disturbed
            if ours - theirs <= allowed + _TRUSTED_NS:
                return
            extra = self._repeated(claim, _AUDIT_NS)
        elif claim < _LONG_NS or extra > allowed:
            extra = self._repeated(claim, _AUDIT_NS)
        if extra > allowed:
            extra = self._repeated(claim, 4 * _AUDIT_NS)
        if extra <= allowed:
            return
        if (
            self._candidate.is_trusted
        ):  # nobody forges its times: what the driver does for it, `printf` say, is its time
            self._hidden = extra / self._batch
            return
        self._checker.evidence = f"claimed {claim / 1000:.0f} µs, {extra / 1000:.0f} µs more by the bench's own clock"
        text = "a timed call keeps the device busy for longer than between its events: work outside of the timed stream"
        raise CandidateFault(Fault.CHEATING, text, "side_stream" if self._refused else "forged_time")

    def _refuse_side_stream(self) -> None:
        """Its time counts on whatever stream it works; that nobody waits for that stream is no honest kernel either."""
        everywhere = statistics.median(elapsed for elapsed, _ in self._beside)
        own = statistics.median(stream for _, stream in self._beside)
        if everywhere > _BESIDE_RATIO * own and everywhere - own > _EXTRA_NS:
            self._checker.evidence = f"{own / 1000:.0f} µs on torch's stream, {everywhere / 1000:.0f} µs on all streams"
            text = "forward returns before its work on another stream is waited for"
            raise CandidateFault(Fault.CHEATING, text, "side_stream")

    def _repeated(self, claim: float, enough_ns: float) -> float:
        """The same from many replays in each call, where a short batch would drown in the noise of calling; the least
        of several calls, because a host only ever adds to them.
        """
        times = max(2, min(200, math.ceil(enough_ns / max(claim, _ORDINARY_NS if self._refused else 1.0))))
        least = {id(self._reference): math.inf, id(self._candidate): math.inf}
        for _ in range(3):
            for session in (self._reference, self._candidate):
                many = self._many(session, times)
                extra = (many.wall_ns - many.elapsed_ns) / times
                least[id(session)] = min(least[id(session)], extra)
        return least[id(self._candidate)] - least[id(self._reference)]

    def _many(self, session: TimedSide, times: int) -> TimedCall:
        limit = max(self._limit_s, times * self._limit_s / 10)
        return session.events(times, limit) if self._refused else session.replay(times, limit)

    def _timing(self, measured: Measured) -> Timing:
        empty = f"{self._empty / 1000:.1f} µs of empty events subtracted"
        if self._refused:
            way = f"events around an ordinary forward ({self._refused}), {self._hidden / 1000:.0f} µs outside of them"
        else:
            way = f"CUDA graph of {self._batch} forward{'s' if self._batch > 1 else ''}"
        reasons = "".join(f", {count} {reason}" for reason, count in sorted(self._faults.items()) if count)
        method = f"paired, cold L2, {way}, {empty}, {measured.rejected} rejected{reasons}"
        chip = torch.cuda.get_device_name(torch.device(self._options.device))
        timing = timing_of(measured, self._options.recipe, method, chip, measured.mhz)
        throttle = sorted({reason for seen in self._seen for reason in seen.throttle})
        return msgspec.structs.replace(timing, throttle=throttle)


def without_chance(trace: wire.Trace | None) -> wire.Trace | None:
    """Where every call has the same answer, memory that an own kernel is given may still hold an earlier one's."""
    if trace is None or trace.answered != BEFORE:
        return trace
    return msgspec.structs.replace(trace, answered="")


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


def _with_hidden(measured: Measured, hidden_ns: float) -> Measured:
    """Time that lies outside of a candidate's events is its time all the same."""
    more = max(0.0, hidden_ns - _HIDDEN_NS) / 1e6
    factor = measured.candidate_ms / (measured.candidate_ms + more)
    inside = measured.interval
    interval = Interval(inside.median * factor, inside.lo * factor, inside.hi * factor)
    return msgspec.structs.replace(measured, interval=interval, candidate_ms=measured.candidate_ms + more)
