"""Both sides of a timing on a GPU, the reference's child and the candidate: what they are given, and what came out."""

from __future__ import annotations

import math
import random

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.verify import compare, wire
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cuda.device_places import BothThere, DevicePlaces, Looks
from kbrl_async.kernels.verify.cuda.reference import CudaReference, ReferencePlan
from kbrl_async.kernels.verify.cuda.session import CudaSession, TimedSide
from kbrl_async.kernels.verify.hoarding import NoMemory, tells_of_memory
from kbrl_async.kernels.verify.input_set import place
from kbrl_async.kernels.verify.report import clean
from kbrl_async.kernels.verify.session import CandidateFault, Session
from kbrl_async.kernels.verify.tolerance import Tolerance
from protocols.records import Fault

_UNSEEN = Looks(lambda: True, lambda: True)
_SLOW, _SHORT_NS, _SLOW_BATCH_NS = 2.0, 150_000.0, 2_400_000.0
"""A forward shorter than the second is not told from a slow one by the time of a call."""
_MAX_REASON = 200
CAPTURE_S = 10.0
_STRETCH = 1 << 23
"""Elements that are compared of a tensor of a timed call, where nothing can know that it is one."""
_LOOKED_AT = 256 << 20
"""Bytes of inputs and outputs of a timed call."""
_IN_A_ROW = "calls that follow each other give wrong results, each alone is right: a race, or state that is left behind"
_BESIDE = "a replay gives another result: it launches on another stream than torch's current one, or acts by phase"


def batch_for(plan: ReferencePlan, reference_ns: float, candidate_ns: float) -> int:
    """Forwards in one timed run. Of a candidate that is clearly slower than its reference fewer, a power of two: how
    much slower it is needs no precision.

    >>> [batch_for(ReferencePlan(16, 16), 40_000.0, ns) for ns in (60_000.0, 1_000_000.0, 3_000_000.0)]
    [16, 4, 1]
    """
    if candidate_ns < _SLOW * max(reference_ns, _SHORT_NS) or not math.isfinite(candidate_ns):
        return plan.batch
    enough = math.ceil(_SLOW_BATCH_NS / candidate_ns)
    return min(plan.batch, 1 << (enough - 1).bit_length())


class Sides:
    """Of one candidate that is right so far, and `twin`, a child of its reference's."""

    places: DevicePlaces | BothThere = BothThere()
    """Where both arenas are, and whose turn it is where the GPU has room for one of them only."""

    def __init__(self, checker: Checker, twin: Session, rng: random.Random, looks: Looks = _UNSEEN) -> None:
        """Nothing that is not timed asks for `looks`."""
        assert isinstance(checker.reference, CudaReference)
        assert isinstance(twin, CudaSession)
        assert isinstance(checker.session, TimedSide)
        self._checker, self._rng = checker, rng
        self.plan, self._pool = checker.reference.plan, checker.reference.pool
        self._slot_bytes = checker.reference.slot_bytes
        self.nominal = checker.reference.sets[0]
        self.reference: TimedSide = twin
        self.candidate: TimedSide = checker.session
        self.limit_s = checker.one_call_s
        """Of one call."""
        self.batch = batch_for(self.plan, checker.reference.forward_ns, checker.session.forward_ns)
        """Forwards in one timed call."""
        if self.candidate.is_kept:
            self.batch = 1
        self.refused = ""
        """Why a forward can't be captured, so that an ordinary one is timed."""
        if checker.reference.offloaded.inputs:
            assert isinstance(self.candidate, CudaSession)
            self.places = DevicePlaces(twin, self.candidate, checker.reference.has_neighbours, looks)

    def fill(self, slots: list[int]) -> None:
        """The same fresh values in both arenas."""
        for slot in slots:
            places = [self.reference.slots[slot], self.candidate.slots[slot]]
            self._rng.shuffle(places)
            self._pool.mix(places, self._rng)

    def park(self) -> None:
        """Before inputs are written that a call is timed on: see `device_places`."""
        self.places.park()

    def bring(self, side: TimedSide) -> None:
        """Before a call of this one's is timed, or asked for."""
        self.places.bring(side)

    def keep_freed(self, is_kept: bool) -> None:
        """See `CudaSession.keeps_freed`."""
        if isinstance(self.reference, CudaSession):
            self.reference.keeps_freed = is_kept

    def capture(self) -> wire.Captured:
        """Where a graph found no memory, once more without what both processes keep of calls before.

        :raises InfraError: what is replayed has no equal, as its reference was captured before and now is not.
        """
        captured = self._capture()
        if tells_of_memory(self.refused):
            for session in (self.reference, self.candidate):
                session.call(wire.OP_FREE, 0, self.limit_s)
            captured = self._capture()
        if self.refused and self.candidate.is_trusted:
            kind = NoMemory if tells_of_memory(self.refused) else InfraError
            raise kind(f"a reference that was timed as a graph can't be captured again ({self.refused})")
        return captured

    def _capture(self) -> wire.Captured:
        count, limit = self.batch, CAPTURE_S + self.limit_s
        self.bring(self.reference)
        reference = self.reference.capture(count, max(limit, 60.0))
        self.bring(self.candidate)
        captured = self.candidate.capture(count, limit)
        refused = captured.refused or (f"the reference: {reference.refused}" if reference.refused else "")
        self.refused = clean(refused)[:_MAX_REASON]
        if self.refused or self.candidate.is_proven:
            return captured
        is_one = count == 1 and self.candidate.is_trusted  # the calls that were checked; timed ones are, too
        if not is_one and not self._replays_rightly():
            if self.candidate.is_trusted:
                raise CandidateFault(Fault.INCORRECT, _IN_A_ROW, "wrong_when_timed")
            self.refused = _BESIDE
            captured = msgspec.structs.replace(captured, refused=_BESIDE)
        self.candidate.is_proven = self.candidate.is_trusted
        return captured

    def _replays_rightly(self) -> bool:
        """Whether a replay does what a call does: kernels launched on another stream are no part of the graph. Of what
        is replayed secret sets are among the inputs: a kernel that counts within a timed run, which variables of the
        device last for, could do from its second forward on what is right of timed calls' inputs alone.
        """
        count = self.batch
        self.park()
        self.fill(list(range(count)))
        tolerances = self._placed_sets(count) if self.candidate.is_trusted else {}
        self.candidate.poison()
        for session in (self.reference, self.candidate):
            self.bring(session)
            session.replay(1, 4 * self.limit_s)
        if not tolerances:
            return self.differ(self.candidate.outputs(0, count), self.reference.outputs(0, count)).wrong == 0
        return all(
            self._checker.compare(
                self.candidate.outputs(slot, slot + 1),
                self.reference.outputs(slot, slot + 1),
                tolerances.get(slot, self.nominal.tolerances),
            ).wrong
            == 0
            for slot in range(count)
        )

    def _placed_sets(self, count: int) -> dict[int, list[Tolerance]]:
        """Secret sets in secret slots of both, and what is allowed there; none where the candidate is spared some."""
        sets = self._checker.reference.sets
        if self.nominal.mutated or self._checker.spared or not self._checker.reference.keeps_sets:
            return {}
        chosen = self._rng.sample(sets, min(count, len(sets)))
        slots = self._rng.sample(range(count), len(chosen))
        for slot, one in zip(slots, chosen, strict=True):
            for side in (self.reference, self.candidate):
                place(side, slot, one)
        return {slot: one.tolerances for slot, one in zip(slots, chosen, strict=True)}

    def check(self, first: int, count: int) -> None:
        """After a timed call over these slots.

        :raises CandidateFault: an output is wrong, or an input was changed.
        """
        end = first + count
        begin, stop = self._looked_at(first, end)
        got, expected = self.candidate.outputs(begin, stop), self.reference.outputs(begin, stop)
        tolerances = self.nominal.tolerances
        if self.candidate.is_trusted:
            whole = [one.numel() for one in expected]
            got, expected = self._sampled(got, expected)
            three = zip(tolerances, expected, whole, strict=True)
            tolerances = [one if part.numel() == size else one.of_each() for one, part, size in three]
        is_right = all(map(compare.agrees, got, expected, tolerances))
        if not is_right and (found := self._checker.compare(got, expected, tolerances)).wrong:
            text = f"{found.wrong} of {found.total} values of a timed call are wrong; the checked calls were right"
            # Of what is replayed nobody knows that it is timed: a race, or what a kernel left behind in its module.
            fault = Fault.INCORRECT if self.candidate.is_trusted else Fault.CHEATING
            raise CandidateFault(fault, text, "wrong_when_timed")
        slot = self._rng.randrange(first, end)
        inputs = self.reference.slots[slot], self.candidate.slots[slot]
        for ours, theirs in zip(*(self._sampled(*inputs) if self.candidate.is_trusted else inputs), strict=True):
            if not self.nominal.mutated and not compare.same_values(ours, theirs):
                raise CandidateFault(Fault.CHEATING, "an input was changed by a timed call", "input_mutation")

    def _looked_at(self, first: int, end: int) -> tuple[int, int]:
        """All slots of a call. Of very large ones that are replayed, where nothing can know whether it is timed, a
        secret one: comparing them all would take longer than they did.
        """
        if not self.candidate.is_trusted or (end - first) * self._slot_bytes <= _LOOKED_AT:
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

    def differ(self, got: list[torch.Tensor], expected: list[torch.Tensor]) -> compare.Difference:
        return self._checker.compare(got, expected, self.nominal.tolerances)
