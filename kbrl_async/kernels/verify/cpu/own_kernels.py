"""Whether a right candidate's own kernels make its outputs, on a processor: its last calls, without them.

::

    observed:  its launcher skips them ─▶ (extensions) what the library makes without what they write
               ─▶ switched off from outside, in a call that looks like every other one; of a process that failed
                  when they were skipped, in another one
    replayed:  a process in which they never were ─▶ (gradients) one without those that upstream gradients reach
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

import torch

from kbrl_async.kernels.backends.launch.elf import needed_names
from kbrl_async.kernels.verify import compare, proof, wire
from kbrl_async.kernels.verify.checks import DEGENERATE_NOTE, Checker
from kbrl_async.kernels.verify.cpu.replay import CpuReplaySession
from kbrl_async.kernels.verify.input_set import InputSet, place, tensors_of
from kbrl_async.kernels.verify.inputs import AS_DRAWN
from kbrl_async.kernels.verify.layouts import Holding, are_answer, have_nearly_all, is_answer, is_moved, runs_of
from kbrl_async.kernels.verify.operators import copies
from kbrl_async.kernels.verify.rivals import Rivals
from kbrl_async.kernels.verify.session import FORGED, CandidateFault, ForwardOutcome, Judged, Session
from protocols.records import Fault

_BLIND = "an answer to other inputs is right here, too, and an operator's result may be one"
_SHORT = "a call without them found no memory"
_SHADOWS_S, _SHADOW_CALLS = 5.0, 20
"""What a call may take in which each operator is done twice, and memory compared between them."""
_UNSEEN = re.compile(
    r"^_ZN2at(3cpu|4meta|6native|10redispatch)|^_ZN2at4_ops\w*10redispatchE|tls_(is|set)_dispatch_key|^cblas_|^mkl_"
    r"|^[sdcz]gem[mv]_?$|^dl(v?sym|m?open)$|^PyImport_Import|^PyRun_|^PyEval_EvalCode|^Py_CompileString"
)
"""Names of what does arithmetic past torch's dispatcher, asks whether it is watched, or finds either by its name."""
_KEPT = 3
"""Calls whose answers a candidate may still hold."""
_AGAIN, _DRAWS = 11, 32
"""Times that what would accuse is looked for once more over new inputs, and draws that this may take: one of which the
answer is the same everywhere, or an input, says nothing."""
Find = Callable[[InputSet], proof.Finding | None]


def to_ask(order: Sequence[InputSet]) -> list[InputSet]:
    """One or two of these sets over which to leave own kernels out: such as inputs are drawn, if there are any, and
    those first that were seen longer ago.
    """
    usable = [one for one in order if not one.degenerate]
    drawn = [one for one in usable if one.name in AS_DRAWN]
    return (drawn or usable[: max(1, len(order) // 2)])[:2]


def to_ask_again(asked: InputSet, order: Sequence[InputSet], draw: Callable[[], InputSet]) -> Iterator[InputSet]:
    """New draws; where such inputs tell nothing, all others of these sets that do, as well."""
    if asked.name not in AS_DRAWN:
        yield from (one for one in order if one is not asked and not one.degenerate)
    drawn = (draw() for _ in range(_DRAWS))
    yield from itertools.islice((one for one in drawn if not one.degenerate), _AGAIN)


def found_over_all(find: Find, input_set: InputSet, others: Iterable[InputSet]) -> proof.Finding | None:
    """What there is against a candidate over these inputs, if it is accused over all others, too: by chance a step may
    change nothing. Others are asked about only then.
    """
    found = find(input_set)
    for other in others if _accuses(found) else ():
        if not _accuses(again := find(other)):
            return again
    return found


def past_the_dispatcher(files: Sequence[Path]) -> proof.Finding | None:
    """A function of the library's that these shared objects call where no operator is seen."""
    for file in files:
        for name in needed_names(file.read_bytes()):
            if _UNSEEN.search(name):
                return proof.unseen(f"its extension calls {name}, where nobody sees what the library does")
    return None


class OwnKernels:
    """Of the candidate that `checker` has found right; what speaks against it becomes the checker's fault."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._rivals = Rivals()

    def prove(self) -> None:
        """The last calls of a right candidate: without its own kernels its outputs must be wrong.

        First its launcher skips them, and its process says whether an operator had the answer; then the kernels are
        switched off from outside, in a call that looks like every other one.
        """
        self._ask()
        self._checker.refuse(self._checker.doubt)

    def _ask(self) -> None:
        if not self._checker.is_recorded or self._checker.fault is not None or self._checker.session is None:
            return
        if self._checker.reference.declared.backward and not self._checker.is_replayed:
            self._checker.refuse(proof.unseen_backward(self._checker.trust_reason))
        sets = to_ask(self._checker.order)
        if not sets:
            self._checker.evidence += f"; {DEGENERATE_NOTE}"
            return
        if self._checker.is_replayed:
            self._checker.refuse(self._not_needed(sets[0]))
            self._checker.refuse(self._not_needed_backward(sets[0]))
            return
        self._checker.is_spent = True
        self._pass_by(sets)
        self._mute(sets)
        session = self._checker.session
        if self._checker.fault is not None or session is None:
            return
        if self._checker.is_replayed:
            self._checker.refuse(self._not_needed(sets[0]))
            return
        found = None
        if self._checker.is_extension:
            found = past_the_dispatcher(self._checker.artifacts) or self._of_shadows(session, sets)
        self._checker.refuse(found or self._switched_off(session, sets))

    def _mute(self, sets: list[InputSet]) -> None:
        """Its launcher skips them. Where that call ends in a fault, its process may be gone, or know of it: another one
        is asked further, as nothing that it does once it is told of skipped kernels keeps it from being asked.
        """
        try:
            self._checker.refuse(self._found_over(sets[0], functools.partial(self._without_kernels, wire.OP_MUTED)))
            return
        except CandidateFault as fault:
            self._checker.refuse(self._shown_by(fault))
        if self._checker.fault is None:
            self._checker.restart()
            if not self._checker.is_replayed:
                self._answer_once(sets[-1])

    def _switched_off(self, session: Judged, sets: list[InputSet]) -> proof.Finding | None:
        """From outside."""
        is_off = session.disarm(self._checker.artifacts, whole=self._checker.is_extension)
        return self._found_off(sets[-1]) if is_off else None

    def _found_off(self, input_set: InputSet) -> proof.Finding | None:
        try:
            return self._found_over(input_set, functools.partial(self._without_kernels, wire.OP_RUN))
        except CandidateFault as fault:
            if self._checker.is_extension:  # of which more is off than its kernels: that ends its process as a rule
                return self._shown_by(fault)
            self._note(fault)
            return proof.failed(fault.text)

    def _answer_once(self, asked: InputSet) -> None:
        """A new process, over another set: afterwards it stands still."""
        if self._checker.fault is not None or self._checker.session is None:
            return
        other = next((one for one in self._checker.order if one is not asked), asked)
        try:
            other.known.load()
            place(self._checker.session, 0, other)
            self._checker.session.call(wire.OP_RUN, 0, self._checker.call_deadline())
        except CandidateFault as fault:
            self._checker.accuse(fault)

    def _found_over(self, input_set: InputSet, find: Find) -> proof.Finding | None:
        are_same = list[bool]()

        def found(one: InputSet) -> proof.Finding | None:
            one.known.load()
            self._rivals.draw(one.expected, one.tolerances)
            are_same.append(self._rivals.is_same)
            return find(one)

        order = self._checker.order
        over_all = found_over_all(found, input_set, to_ask_again(input_set, order, self._checker.reference.drawn))
        if _accuses(over_all) and _is_one(are_same):  # a problem may draw the same every time
            varied = [one for one in order if one.name not in AS_DRAWN and not one.degenerate]
            over_all = found_over_all(found, varied[0], varied[1:]) if varied else over_all
        return proof.one_answer() if _accuses(over_all) and _is_one(are_same) else over_all

    def _pass_by(self, sets: list[InputSet]) -> None:
        """Calls over others, where it has just seen one of these: what it keeps in a scratch buffer answers those."""
        assert self._checker.session is not None
        asked = {id(one) for one in sets}
        others = [other for other in self._checker.order if id(other) not in asked]
        if asked.isdisjoint(map(id, self._checker.order[-_KEPT:])):
            return
        try:
            for other in others[:_KEPT]:
                other.known.load()
                place(self._checker.session, 0, other)
                self._checker.session.call(wire.OP_RUN, 0, self._checker.one_call_s)
        except CandidateFault as fault:
            self._checker.accuse(fault)

    def _of_shadows(self, session: Judged, sets: list[InputSet]) -> proof.Finding | None:
        """Whether the library alone makes the answer, wherever it is called."""
        try:
            other = sets[0] if len(sets) > 1 else self._checker.reference.drawn()  # so that what lasts changes
            for slot, input_set in {len(session.slots) - 1: other, 0: sets[-1]}.items():
                input_set.known.load()
                place(session, slot, input_set)
            trace = session.call(wire.OP_SHADOWED, 0, _SHADOWS_S + _SHADOW_CALLS * self._checker.one_call_s).trace
        except CandidateFault as fault:
            self._note(fault)
            return proof.unseen(f"a call in which its operators are done again failed: {fault.text}")
        return proof.of_shadows(trace.answered) if trace is not None and trace.answered else None

    def _not_needed(self, input_set: InputSet) -> proof.Finding | None:
        """Of a replay: without its own kernels, is it right, or does an operator's result hold the answer? Asked of a
        process in which they never were."""
        assert isinstance(self._checker.session, CpuReplaySession)
        with contextlib.closing(self._checker.session.muted()) as session:
            self._checker.reference.attach(session)
            try:
                return self._found_over(input_set, functools.partial(self._found_without, session))
            except CandidateFault as fault:
                return self._shown_by(fault)

    def _not_needed_backward(self, input_set: InputSet) -> proof.Finding | None:
        """Where gradients are asked for: are they right without the own kernels that upstream gradients reach?"""
        if not self._checker.reference.declared.backward:
            return None
        assert isinstance(self._checker.session, CpuReplaySession)
        upstream = tensors_of(self._checker.reference.tree, len(self._checker.reference.tree[1]) - 1)
        try:
            session = self._checker.session.without_backward(upstream)
            if session is None:
                return proof.of_backward(False)
            with contextlib.closing(session):
                self._checker.reference.attach(session)
                return self._found_over(input_set, functools.partial(self._right_without, session))
        except CandidateFault as fault:  # maybe by code of its own, which runs there, too
            return self._shown_by(fault)

    def _right_without(self, session: Session, input_set: InputSet) -> proof.Finding | None:
        place(session, 0, input_set)
        outcome = session.call(wire.OP_RUN, 0, 2 * self._checker.one_call_s)
        return proof.of_backward(True) if self._is_right(session, outcome, input_set) else None

    def _is_right(self, session: Judged, outcome: ForwardOutcome, input_set: InputSet) -> bool:
        """See `Rivals`."""
        if not self._checker.is_right(session, outcome, input_set):
            return False
        return not self._rivals or self._rivals.are_beaten(self._checker.outputs(outcome, session), input_set.expected)

    def _shown_by(self, fault: CandidateFault) -> proof.Finding | None:
        """By a call without its kernels that fails or hangs: it needs them, which is all that is asked here, unless
        there was no memory for the call.
        """
        self._note(fault)
        return proof.unseen(f"{_SHORT}: {fault.text}") if fault.kind is Fault.OUT_OF_MEMORY else None

    def _note(self, fault: CandidateFault) -> None:
        """What no honest process sends, whatever is missing in it, is a fault of its own. Where the reference fails,
        nothing is shown of the candidate, and that is raised again.
        """
        if fault.by is self._checker.reference.session:
            raise fault
        if fault.rule == FORGED:
            self._checker.fault = self._checker.fault or fault

    def _found_without(self, session: Session, input_set: InputSet) -> proof.Finding | None:
        session.call(wire.OP_POISON_ON, 0, self._checker.one_call_s)
        place(session, 0, input_set)
        outcome = session.call(wire.OP_MUTED, 0, 2 * self._checker.one_call_s)
        outputs, kept = self._parts(outcome)
        if self._is_right(session, outputs, input_set):
            return proof.of_muted(outcome.trace, True)
        results: dict[str, list[wire.TensorMeta]] = {}
        for name, meta in kept.items():
            results.setdefault(name.partition(" ")[2], []).append(meta)
        places = zip(session.slots[0], input_set.blocks, strict=True) if input_set.mutated else ()
        changed = [place.clone() for place, given in places if not compare.same_values(place, given)]
        for answer in self._answers(input_set):
            if operator := self._passed_on(session, results, input_set, answer):
                return proof.passed_on(operator)
            holding = Holding(answer)
            if any(holding.moves(functools.partial(is_answer, one)) for one in changed):
                return proof.passed_on(proof.IN_PLACE)
        return None

    def _passed_on(
        self,
        session: Session,
        results: dict[str, list[wire.TensorMeta]],
        input_set: InputSet,
        answer: list[torch.Tensor],
    ) -> str:
        """The operator with whose results, by operator, the library has this answer; empty: it has not."""
        holding = Holding(answer, [] if input_set.mutated else input_set.blocks)
        for operator, metas in results.items():
            if copies(operator):
                if holding.moves(functools.partial(self._is_moved, session, metas, input_set)):
                    return operator
            elif holding.adds(functools.partial(self._holds, session, metas, answer)):
                return operator
        if self._rivals:
            return ""
        computed = [(operator, meta) for operator, metas in results.items() for meta in metas if not copies(operator)]
        metas = [meta for _, meta in computed]
        return computed[-1][0] if holding.adds(functools.partial(self._is_put_together, session, metas)) else ""

    def _is_put_together(self, session: Session, metas: list[wire.TensorMeta], wanted: torch.Tensor) -> bool:
        """Whether it lies in operators' results in parts, or within a larger one."""
        others = (session.read(meta) for meta in metas if meta.shape != tuple(wanted.shape))
        return have_nearly_all(others, wanted)

    def _answers(self, input_set: InputSet) -> Iterator[list[torch.Tensor]]:
        """The reference's, and its own: that is what a copy has, to the last bit, however far it is from the first."""
        yield input_set.expected
        session = self._checker.session
        assert session is not None
        try:
            place(session, 0, input_set)
            own = self._checker.outputs(session.call(wire.OP_RUN, 0, 2 * self._checker.one_call_s))
        except CandidateFault as fault:
            self._checker.accuse(fault)
            return
        yield own

    def _holds(
        self, session: Session, metas: list[wire.TensorMeta], answer: list[torch.Tensor], wanted: torch.Tensor
    ) -> bool:
        """Whether one of an operator's results is the answer, or several that follow each other are its parts."""
        sizes = [math.prod(meta.shape) for meta in metas]
        alone = (session.read(meta) for meta, size in zip(metas, sizes, strict=True) if size == wanted.numel())
        number = next(number for number, one in enumerate(answer) if one is wanted)
        if any(is_answer(item, wanted) and self._rivals.is_beaten(number, item, wanted) for item in alone):
            return True
        parts = (metas[run] for run in runs_of(sizes, wanted.numel()))
        return any(are_answer([session.read(meta) for meta in run], wanted) for run in parts)

    def _is_moved(
        self, session: Session, metas: list[wire.TensorMeta], input_set: InputSet, wanted: torch.Tensor
    ) -> bool:
        """Whether a copy of the library's is all that was to be done for this output."""
        alike = (session.read(meta) for meta in metas if math.prod(meta.shape) == wanted.numel())
        return any(is_moved(item, wanted, input_set.blocks) for item in alike)

    def _parts(self, outcome: ForwardOutcome) -> tuple[ForwardOutcome, dict[str, wire.TensorMeta]]:
        try:
            return outcome.parts()
        except ValueError as error:
            raise CandidateFault(Fault.CHEATING, f"{error}", FORGED) from error

    def _without_kernels(self, op: int, input_set: InputSet) -> proof.Finding | None:
        """What its process tells; and are the outputs right all the same?"""
        session = self._checker.session
        assert session is not None
        session.call(wire.OP_POISON_ON, 0, self._checker.one_call_s)
        place(session, 0, input_set)
        outcome = session.call(op, 0, 2 * self._checker.one_call_s)
        if outcome.trace is not None and outcome.trace.answered:  # whatever it gives without them
            return proof.unseen(_BLIND) if self._rivals else proof.passed_on(outcome.trace.answered)
        got = self._checker.outputs(outcome)
        is_right = not self._checker.compare(got, input_set.expected, input_set.tolerances).wrong
        return proof.of_muted(outcome.trace, is_right and self._rivals.are_beaten(got, input_set.expected))


def _is_one(are_same: list[bool]) -> bool:
    """Whether all draws after the first had its answer."""
    return len(are_same) > 1 and all(are_same[1:])


def _accuses(found: proof.Finding | None) -> TypeGuard[proof.Finding]:
    return found is not None and found.fault is Fault.CHEATING
