"""Whether a candidate's own kernels make its outputs, on a GPU: by what was captured of it, with and without them."""

from __future__ import annotations

import math

import msgspec
import torch

from kbrl_async.kernels.verify import compare, proof, wire
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cpu.trace import BEFORE, UNMADE
from kbrl_async.kernels.verify.cuda import proof as cuda_proof
from kbrl_async.kernels.verify.cuda.replay.session import ReplaySession
from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.cuda.sides import Sides
from kbrl_async.kernels.verify.hoarding import NoMemory
from kbrl_async.kernels.verify.input_set import is_degenerate, tensors_of
from kbrl_async.kernels.verify.layouts import Holding, TensorCheck, have_nearly_all, is_answer, is_moved
from kbrl_async.kernels.verify.pieces import countable
from kbrl_async.kernels.verify.proof import IN_PLACE
from kbrl_async.kernels.verify.rivals import Rivals, sample_of
from kbrl_async.kernels.verify.session import FORGED, CandidateFault
from protocols.records import Candidate, Fault

_LOOKS = 6
"""At most, at the share of own kernels, before too small a one is held against a candidate."""
_WRONG_LATER = "a later call gives wrong results; those that were checked were right"
_OTHERS = 4
"""Calls over other inputs before one without own kernels: its process keeps its last three answers, and what it gives
back torch hands out again. After fewer a kernel that is skipped would seem to be given the very answer."""
_AGAIN, _DRAWS = 3, 8
"""Times that what would accuse is looked for once more over new inputs, and draws that this may take: of few or small
whole numbers a chance makes the answer, and a draw whose answer is the same everywhere says nothing."""
_LACKED = "the library found too little memory with or without own kernels, and may have gone two ways"
_BLIND = "an answer to other inputs is right here, too, and memory may hold one"
_WIDER = 10.0
"""Times its tolerances an answer to other inputs may be off, and what a call leaves in memory still be right."""
_LARGE = 1 << 26
"""Elements of an output that is not looked for within a larger result: that takes several times its memory."""
_PROVEN = 4
"""Slots over which own kernels are left out: where half of what is timed is the library's, 15 times of 16 it shows."""


class CapturedKernels:
    """Of the candidate's side; evidence and share go to `checker`."""

    def __init__(self, checker: Checker, sides: Sides) -> None:
        self._checker, self._sides = checker, sides
        self._is_blind = False
        """Whether an answer to other inputs was right, or nearly, of the last ones that a watched candidate was asked
        for; or there were no others.
        """
        self._tells = True
        """Whether the last draw's answer is one that zeros, a constant, an input or the answer before it is not."""
        self._given: list[torch.Tensor] = []
        """What forward changes of that draw's inputs, as they were before: a sample of each."""
        self._rivals = Rivals()

    def finding(self, captured: wire.Captured, candidate: Candidate) -> proof.Finding | None:
        return self._of_all(captured, candidate) or self.of_backward()

    def of_backward(self) -> proof.Finding | None:
        """Where gradients are asked for: are they right without the own kernels of the backward? Those are all that are
        launched once upstream gradients have been read, which only a replay shows.
        """
        sides, reference = self._sides, self._checker.reference
        session = sides.candidate
        if not reference.declared.backward or sides.nominal.degenerate:
            return None
        if not isinstance(session, ReplaySession):
            return proof.unseen_backward(self._checker.trust_reason)
        slot = session.secret_slots(sides.batch, 1)[0]
        behind = session.own_behind(tensors_of(reference.tree, len(reference.tree[1]) - 1), slot)
        if behind is None:
            return None
        if not behind:
            return msgspec.structs.replace(proof.of_backward(False), fault=Fault.UNPROVEN)
        for _ in range(_AGAIN):
            expected = self._drawn(slot)
            session.without(behind, slot, sides.limit_s)
            if not self._is_right(session.outputs(slot, slot + 1), expected):
                return None
        return proof.of_backward(True)

    def _of_all(self, captured: wire.Captured, candidate: Candidate) -> proof.Finding | None:
        if captured.refused:
            return self._launches()
        names, session = captured.kernels, self._sides.candidate
        own = session.own_kernels(candidate.source)
        if isinstance(session, ReplaySession) and (bare := session.bare_trace) is not None:
            return proof.of_recorded(bare, has_times=False)
        if not own:  # `<<<…>>>` without a stream is launched beside any capture: look at what was launched
            return self._launches()
        self._checker.evidence = cuda_proof.evidence(names, own)
        if isinstance(session, ReplaySession) and len(own) == len(names):  # without them nothing runs at all
            self._checker.own_share, self._checker.evidence = 1.0, cuda_proof.evidence(names, own, 1.0)
            return None
        whole = left = math.inf
        count = self._sides.batch
        slot, *others = session.secret_slots(count, _PROVEN) if isinstance(session, ReplaySession) else [0]
        for _ in range(_LOOKS):  # others' work is in these times, too, on either side: the least of each holds
            whole_ns, left_ns, is_right, answered = self._told_without(own, slot)
            whole, left = min(whole, whole_ns), min(left, left_ns)
            self._checker.evidence = cuda_proof.evidence(names, own, cuda_proof.own_share(whole, left))
            if isinstance(session, ReplaySession):  # who is observed can answer for its parts as it likes
                self._checker.own_share = cuda_proof.told_share(names, own, whole, left)
            found = proof.of_muted(wire.Trace(answered=answered), is_right)
            if found is not None:
                is_again = self._is_found_again(own, slot)
                if is_again is not False:
                    return found if is_again else proof.one_answer()
            if cuda_proof.of_share(names, own, whole, left) is None:
                return self._over(session, own, others) if isinstance(session, ReplaySession) else None
        if isinstance(session, ReplaySession) and self._takes_time_alone(session, slot, whole):
            return self._over(session, own, others)
        return cuda_proof.of_share(names, own, whole, left)

    def _takes_time_alone(self, session: ReplaySession, slot: int, whole_ns: float) -> bool:
        """Whether own kernels take their share by themselves, though without them a forward is hardly shorter: a step
        that finds its input in no cache, because the own kernel before it was left out, may take as much longer. Who
        makes them longer there could have done so in each forward, and is told no larger share for it.
        """
        self._drawn(slot)
        return session.own_alone(slot, 10 * self._sides.limit_s) >= cuda_proof.MIN_SHARE * whole_ns

    def _over(self, session: ReplaySession, own: list[str], slots: list[int]) -> proof.Finding | None:
        def found_without(expected: list[torch.Tensor], slot: int) -> tuple[bool, str]:
            found = self._found_without(expected, slot)
            return found if found == (False, "") or self._is_found_again(own, slot) else (False, "")

        return cuda_proof.of_other_slots(session, slots, 10 * self._sides.limit_s, self._drawn, found_without)

    def _told_without(self, own: list[str], slot: int) -> tuple[float, float, bool, str]:
        """`without`, over other inputs for as long as their answer says nothing."""
        found = self.without(own, slot)
        for _ in range(0 if self._sides.nominal.degenerate else _DRAWS):
            if self._tells:
                break
            found = self.without(own, slot)
        return found

    def _is_found_again(self, own: list[str], slot: int) -> bool | None:
        """Each time, over other inputs at the same place; None where all draws have one answer."""
        seen = others = 0
        for _ in range(_DRAWS):
            found = self.without(own, slot)[2:]
            if found == (False, "") and self._tells:
                return False
            seen += self._tells
            others += not self._rivals.is_same
            if seen == _AGAIN:
                break
        return seen > 0 if others else None

    def _drawn(self, slot: int) -> list[torch.Tensor]:
        """New inputs in this slot of both: what the reference answers."""
        self._sides.fill([slot])
        if self._sides.nominal.mutated:
            self._given = [sample_of(given).clone() for given in self._sides.reference.slots[slot]]
        expected = [output.unsqueeze(0) for output in self._expected_of(slot)]
        self._rivals.draw(expected, self._sides.nominal.tolerances)
        return expected

    def _launches(self) -> proof.Finding | None:
        """As on a CPU, where a forward can't be captured: what the launchers counted."""
        self._sides.fill([0])
        trace = self._sides.candidate.call(wire.OP_TRACE, 0, self._sides.limit_s).trace
        assert trace is not None, "a call that is to be told of is, or is refused"
        found = proof.of_recorded(trace, has_times=False, is_extension=self._checker.launches_unseen)
        if found is None:
            self._checker.evidence = proof.evidence(trace)
        return found

    def of_watched(self, may_lack: bool = False) -> proof.Finding | None:
        """Of who is not replayed: a call whose launches are skipped, as the last, because one that needs what own
        kernels make may end its process. Nobody else sees what the library's operators had made by then. What accuses
        is looked for twice, over inputs of its own each time: what lies in memory by chance is no decoy. Where answers
        to other inputs are right, too, such a chance is no rare one, and nobody is accused. `may_lack`: others may have
        the memory that a library wants.

        :raises NoMemory: such a call takes more than the others did, or others took what was there.
        """
        found = self._without_launches(may_lack)
        if found is None or found.fault is not Fault.CHEATING:
            return found
        if self._is_blind:
            return proof.unseen(_BLIND)
        again = self._without_launches(may_lack)
        if self._is_blind:
            return proof.unseen(_BLIND)
        if again is not None and again.fault is Fault.CHEATING:
            return again
        return proof.unseen(f"of two calls without them one says that {found.text}")

    def _without_launches(self, may_lack: bool) -> proof.Finding | None:
        candidate = self._sides.candidate
        assert isinstance(candidate, CudaSession)
        answer, expected, inside, was_short = self._known_answer(candidate)
        given = candidate.slots[0] if self._sides.nominal.mutated else []
        before = [sample_of(one).clone() for one in given]
        holding = Holding(expected if given else [], given)  # by the inputs as they come
        try:
            muted = candidate.watched_forward(wire.OP_MUTED, answer, 2 * self._sides.limit_s)
            trace = without_chance(muted.trace) if self._sides.nominal.degenerate else muted.trace
            assert trace is not None, "a call that is to be told of is, or is refused"
            if trace.answered:
                return proof.passed_on(trace.answered)
            if may_lack and muted.is_short != was_short:
                raise NoMemory(_LACKED)
            is_right = self._is_right(self._checker.outputs(muted), expected)
        except CandidateFault as fault:
            if fault.rule == FORGED:
                raise
            if fault.kind is Fault.OUT_OF_MEMORY:
                raise NoMemory(f"a call without its own kernels found no memory: {fault.text}") from fault
            return proof.failed(fault.text)
        if not is_right and inside:
            return proof.unseen(f"{inside}, called by an own kernel, gives the answer")
        if not is_right and trace.unseen:
            return proof.unseen(f"{trace.unseen} runs in a CUDA graph of its own, where nobody sees its result")
        if self._sides.nominal.degenerate:  # poison may be right there, too
            return None
        answered = self._left_in(_changed(given, before), expected, holding)
        found = proof.of_muted(msgspec.structs.replace(trace, answered=answered), is_right)
        return found if found is None or trace.launches else proof.unseen("its launches were not seen")

    def _known_answer(self, candidate: CudaSession) -> tuple[list[torch.Tensor], list[torch.Tensor], str, bool]:
        """What the candidate makes of fresh inputs, and what is expected of it, which lies in the reference's arena;
        and which operator that an own kernel calls has that as its result: skipped with it, it may have done all or the
        last of the work. Then it gets these inputs again, after calls over others: what it has in memory is of those.
        The last: whether the library found too little memory for it.
        """
        sides = self._sides
        sides.bring(candidate)
        if not self._checker.reference.keeps_sets:
            candidate.call(wire.OP_FREE, 0, sides.limit_s)  # of its graphs and earlier answers
        sides.fill([0])
        self._rivals, tolerances = Rivals(), [one.widened(_WIDER) for one in sides.nominal.tolerances]
        self._rivals.draw(self._looked_at(), tolerances)
        sides.fill([0])
        inputs = [self._aside(place) for place in candidate.slots[0]]
        expected = self._looked_at()
        self._rivals.draw(expected, tolerances)
        self._is_blind = self._rivals.is_blind
        outcome = candidate.call(wire.OP_RUN, 0, sides.limit_s)
        got = self._checker.outputs(outcome)
        if sides.differ(got, expected).wrong:
            raise CandidateFault(Fault.INCORRECT, _WRONG_LATER, "wrong_when_timed")
        answer = [self._aside(tensor) for tensor in got]
        del got
        self._is_blind |= not self._fill_others(inputs)
        candidate.call(wire.OP_TRACE, 0, sides.limit_s)  # numbers that its functions give are of these
        _put_back(candidate.slots[0], inputs)
        traced = candidate.watched_forward(wire.OP_TRACE, answer, 2 * sides.limit_s).trace
        assert traced is not None, "a call that is to be told of is, or is refused"
        for _ in range(_OTHERS):
            self._is_blind |= not self._fill_others(inputs)
            candidate.call(wire.OP_RUN, 0, sides.limit_s)
        _put_back(candidate.slots[0], inputs)
        return answer, expected, traced.answered, outcome.is_short

    def _looked_at(self) -> list[torch.Tensor]:
        """What the reference answers, in its arena; its process keeps none of it where memory is scarce."""
        reference, whole = self._sides.reference, self._checker.reference
        answered = reference.call(wire.OP_RUN, 0, self._sides.limit_s)
        if not whole.keeps_sets:
            whole.forget_outputs()
        return [reference.look(meta) for meta in answered.tensors]

    def _fill_others(self, inputs: list[torch.Tensor]) -> bool:
        """Draw until something is other than in these inputs, which may be one of very few that there are."""
        for _ in range(_DRAWS):
            self._sides.fill([0])
            both = zip(self._sides.candidate.slots[0], inputs, strict=True)
            if not all(compare.same_values(*map(sample_of, two)) for two in both):
                return True
        return False

    def _aside(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy; of a large problem's on the host."""
        return tensor.clone() if self._checker.reference.keeps_sets else tensor.to("cpu", copy=True)

    def _expected_of(self, slot: int) -> list[torch.Tensor]:
        outcome = self._sides.reference.call(wire.OP_RUN, slot, self._sides.limit_s)
        return [self._sides.reference.read(meta) for meta in outcome.tensors]

    def without(self, own: list[str], slot: int) -> tuple[float, float, bool, str]:
        """Times with and without the own kernels, whether the outputs are right without them, and the operator whose
        result already is an output.
        """
        expected: list[torch.Tensor] = []

        def draw() -> None:
            expected[:] = self._drawn(slot)

        def renew() -> None:
            if self._sides.nominal.mutated:
                draw()

        candidate = self._sides.candidate
        draw()
        candidate.poison()
        whole, left = candidate.muted(own, 10 * self._sides.limit_s, renew, slot)
        return whole, left, *self._found_without(expected, slot)

    def _found_without(self, expected: list[torch.Tensor], slot: int) -> tuple[bool, str]:
        """After a run over this slot without own kernels: is it right, and which operator's result is the answer?
        Neither where anything would be.
        """
        sides = self._sides
        inputs = [] if sides.nominal.mutated else sides.reference.slots[slot]  # an answer may lie in what is changed
        self._tells = not self._rivals.is_same and not is_degenerate(inputs, expected, sides.nominal.tolerances)
        if not self._tells:
            return False, ""
        if not sides.nominal.degenerate and self._is_right(sides.candidate.outputs(slot, slot + 1), expected):
            return True, ""
        holding = Holding(expected, inputs)

        def is_all_moved(one: torch.Tensor) -> bool:
            return holding.moves(lambda wanted: is_moved(one, wanted, inputs))

        def is_most(one: torch.Tensor) -> bool:
            return holding.adds(self._is_one_of(one, expected))

        found = sides.candidate.answered(is_most, slot, is_all_moved)
        if found or not sides.nominal.mutated or not isinstance(sides.candidate, ReplaySession):
            return False, found  # of who is observed a whole forward ran last: `of_watched` looks at what it changes
        return False, self._left_in(_changed(sides.candidate.slots[slot], self._given), expected, holding)

    def _left_in(self, changed: list[torch.Tensor], expected: list[torch.Tensor], holding: Holding) -> str:
        """`IN_PLACE` where all that is expected and was not held yet lies in these inputs."""
        return IN_PLACE if any(holding.moves(self._is_one_of(one, expected)) for one in changed) else ""

    def _is_right(self, outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        return not self._sides.differ(outputs, expected).wrong and self._rivals.are_beaten(outputs, expected)

    def _is_one_of(self, one: torch.Tensor, expected: list[torch.Tensor]) -> TensorCheck:
        return lambda wanted: self._is_output(one, expected, wanted)

    def _is_output(self, one: torch.Tensor, expected: list[torch.Tensor], wanted: torch.Tensor) -> bool:
        """Whether a tensor is this one of what is expected, or has it within."""
        number = next(number for number, output in enumerate(expected) if output is wanted)
        is_alike = _is_one(one, wanted, self._sides.nominal.tolerances[number])
        if not is_alike and wanted.numel() < min(one.numel(), _LARGE) and not self._rivals:
            of_a_slot = [wanted[0]] if wanted.dim() and len(wanted) == 1 else []
            is_alike = any(have_nearly_all([one], answer) for answer in (wanted, *of_a_slot))
        return is_alike and self._rivals.is_beaten(number, one, wanted)


def _put_back(places: list[torch.Tensor], blocks: list[torch.Tensor]) -> None:
    for place, block in zip(places, blocks, strict=True):
        place.copy_(block)


def _changed(places: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs over which forward has written without own kernels, of which these are samples from before."""
    both = zip(places, given, strict=True)
    return [place for place, before in both if not compare.same_values(sample_of(place), before)]


def _is_one(got: torch.Tensor, wanted: torch.Tensor, tolerance: compare.Tolerance) -> bool:
    """Whether a tensor holds all values of an output, in whatever order and shape."""
    is_exact = wanted.numel() == 1 or not wanted.is_floating_point()
    if got.numel() == wanted.numel() and is_exact and is_answer(got, wanted.to(got.device)):
        return True
    if got.numel() == wanted.numel() > 1 and wanted.is_floating_point() and got.is_floating_point():
        a, b = countable(got.flatten().to(wanted.dtype)), countable(wanted.flatten())
        if compare.difference(a, b, tolerance).wrong == 0:
            return True
        # sorting takes several times their memory: first whether the least and the largest may be the same
        ends = [torch.stack(one.aminmax()) for one in (a, b)]
        is_near = compare.difference(ends[0], ends[1], tolerance).wrong == 0
        return is_near and compare.difference(a.sort()[0], b.sort()[0], tolerance).wrong == 0
    return False


def without_chance(trace: wire.Trace | None) -> wire.Trace | None:
    """Where every call has the same answer, memory that an own kernel is given may still hold an earlier one's."""
    if trace is None or trace.answered not in (BEFORE, UNMADE):
        return trace
    return msgspec.structs.replace(trace, answered="")
