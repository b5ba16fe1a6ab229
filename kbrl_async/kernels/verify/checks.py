"""One candidate against its reference: runs every secret input set and records what it finds.

::

    start ─▶ for each set, in secret order: write inputs ─▶ call ─▶ freeze ─▶ read and compare outputs,
             compare inputs with the originals, compare the previous output with what it was

One of the calls is recorded (own launches, operators), and after one of them the inputs are overwritten to see whether
an output shares their memory; which ones is secret.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from kbrl_async.kernels.backends.backend import LIBRARY, Backend, backend
from kbrl_async.kernels.backends.launch import plan
from kbrl_async.kernels.backends.launch.uncompiled import has_its_own
from kbrl_async.kernels.problems import backward
from kbrl_async.kernels.problems.beside import modules_of
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.verify import compare, proof, similarity, wire
from kbrl_async.kernels.verify.cpu.replay import NoReplay
from kbrl_async.kernels.verify.input_set import InputSet, follows_inputs, place
from kbrl_async.kernels.verify.inputs import in_secret_order
from kbrl_async.kernels.verify.options import BenchOptions, compiling_s
from kbrl_async.kernels.verify.outputs import of_call
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import FORGED, CandidateFault, ForwardOutcome, Judged, Session, Submission
from protocols.records import OBSERVED, REPLAYED, SPARED_SETS, Candidate, Fault

KNOWN_SETS = 2
_LAUNCHERS = re.compile(r"\b(cupy|pycuda|numba|cuda\.bindings|cuLaunch\w+)\b")
_SLOW = 2.0
"""By its fastest call so far: only such a kernel may be spared sets."""
Opens = Callable[[Submission, bool], Judged]
"""`Device.judged`, bound to what the checker was made with."""


def submitted(candidate: Candidate, artifacts: dict[str, Path]) -> Submission:
    return Submission(candidate.source, candidate.backend, {key: str(path) for key, path in artifacts.items()})


def _close(session: Judged, _is_spent: bool) -> None:
    session.close()


class Checker:
    """The trusted side's view of one candidate. `fault` is the first thing that ended or disqualified it."""

    def __init__(
        self,
        zygote: Zygote,
        reference: Reference,
        options: BenchOptions,
        rng: random.Random,
        opens: Opens,
        release: Callable[[Judged, bool], None] = _close,
    ) -> None:
        """`release`: told of what was opened when it is needed no more, and whether nobody else may have it."""
        self.reference, self.options = reference, options
        self._zygote, self._rng, self._opens, self._release = zygote, rng, opens, release
        self.session: Judged | None = None
        self.fault: CandidateFault | None = None
        self.passed = 0
        self.near = 0
        self.own_share: float | None = None
        """Of a call's time on the device, that of the candidate's own kernels; None: not known."""
        self.doubt: proof.Finding | None = None
        """What refuses a candidate whose own kernels turn out to be needed; else that accuses it."""
        self.total = len(reference.sets)
        self.worst: compare.Difference | None = None
        self.failed: list[tuple[str, compare.Difference]] = []
        self.kernelbench: bool | None = None
        """Whether KernelBench's own comparison passes on every nominal set so far."""
        self.carries_state = False
        """The same inputs were answered rightly once and wrongly another time."""
        self.evidence = ""
        self.trust, self.trust_reason, self.is_shared = OBSERVED, "", False
        self.order: list[InputSet] = []
        """All sets but the first, as they come."""
        self.artifacts: list[Path] = []
        self._recorded = 0
        self._left: list[tuple[int, InputSet]] = []
        """Sets that it has not seen."""
        self._slots: list[int] = []
        self._held_at = 0
        """Where memory is scarce, an earlier output is there at this set only, which is secret."""
        self._overwritten: set[int] = set()
        self._may_be_spared = False
        self._calls_s: list[float] = []
        self._answers: dict[int, bool] = {}
        self._compiling_until = 0.0
        """Until when its calls may last that long; 0 where torch compiles nothing for it."""
        self._is_warm = False
        """Its process has answered once."""
        self._first_answer: list[torch.Tensor] = []
        self._earlier: list[tuple[wire.TensorMeta, torch.Tensor]] = []
        self._backend: Backend = LIBRARY
        self._submitted: tuple[Candidate, dict[str, Path]] | None = None
        self.launches_unseen = False
        """Whether it may launch its kernels by what nobody counts: that none was seen accuses nobody then."""
        self.is_spent = False
        """Its kernels were switched off, and its memory poisoned."""
        self.is_recorded = False
        """One of its calls was, so that own launches and operators are known."""
        self._trace: wire.Trace | None = None
        self.isolation: tuple[str, tuple[str, ...]] = ("none", ("the candidate was not started",))

    @property
    def tolerance_note(self) -> str:
        """What was allowed on the first set, and where equality was asked for."""
        sets = self.reference.sets
        exact = sorted({s.name for s in sets if any(tolerance.exact for tolerance in s.tolerances)})
        note = "; ".join(dict.fromkeys(tolerance.note() for tolerance in sets[0].tolerances))
        return note + (f"; on {', '.join(exact)} inputs {EXACT_NOTE}" if exact else "")

    def close(self) -> None:
        if self.session is not None:
            self._release(self.session, self.is_spent)
            self.session = None

    def start(self, candidate: Candidate, artifacts: dict[str, Path], is_alone: bool = False) -> None:
        """Fork, confine and build the candidate. `is_alone`: in no process that has served another one.

        :raises CandidateFault: the reference's.
        """
        # A launch plan has no other way to an answer than its own kernels; a GPU has a way of its own to ask.
        is_asked = self.reference.records and not plan.is_plan(candidate.source) and self.is_proven
        self._submitted, self._is_warm = (candidate, artifacts), False
        self._backend = backend(candidate.backend)
        self.is_recorded = is_asked and self._backend.is_recorded
        self.artifacts = list(artifacts.values())
        self._began = time.monotonic()
        self._deadline = self._began + self.options.deadline_s
        try:
            self._refuse_copied(candidate)
            code = submitted(candidate, artifacts)
            self.launches_unseen = _LAUNCHERS.search(code.source) is not None or has_its_own(code.source)
            source = code.source + backward.of_candidate(self.reference.declared.backward)
            self.session = self._opens(msgspec.structs.replace(code, source=source), is_alone)
            self.isolation = (self.session.isolation.level, self.session.isolation.missing)
            self.trust, self.trust_reason = self.session.trust, self.session.trust_reason
            self.is_shared = self.session.is_shared
            if for_s := compiling_s(self.options, code.source):
                self._compiling_until = time.monotonic() + for_s
            self.reference.attach(self.session)
            self._replay(candidate, artifacts)
        except CandidateFault as fault:
            if fault.by is self.reference.session:  # asked for what a candidate is recorded on
                raise
            self.fault = fault

    def _replay(self, candidate: Candidate, artifacts: dict[str, Path]) -> None:
        """Goes on with a child that does again what this one recorded, where there can be one."""
        session = self.session
        if not isinstance(session, Session) or not self.reference.records:
            return
        self.trust = OBSERVED
        if not (self.options.replay and self._backend.is_replayed):
            self.trust_reason = f"kernels of {candidate.backend} are not replayed here"
            return
        try:
            self.session = self.reference.replayed(self._zygote, session, artifacts, self)
        except NoReplay as reason:
            self.trust_reason = str(reason)
            return
        self._release(session, False)
        self.trust, self.trust_reason, self.own_share = REPLAYED, "", self.session.own_share

    @property
    def is_proven(self) -> bool:
        """Whether it has to be shown that its own kernels are needed: where every output is empty, nothing is to do."""
        return self.options.is_proven and any(tensor.numel() for tensor in self.reference.wanted)

    @property
    def is_known(self) -> bool:
        """Whether a verifier has found the same steps right and own."""
        return bool(self.options.known) and self.session is not None and self.session.plan == self.options.known

    @property
    def is_replayed(self) -> bool:
        return self.trust == REPLAYED

    @property
    def is_extension(self) -> bool:
        return self._backend.is_extension

    @property
    def is_untrusted(self) -> bool:
        """Whether somebody else wrote it: what is measured of torch itself is ours."""
        return self._backend.needs_own_kernels

    def is_right(self, session: Judged, outcome: ForwardOutcome, input_set: InputSet) -> bool:
        """Whether a call of its answers these inputs."""
        self._is_warm = True
        try:
            got = self.outputs(outcome, session)
        except CandidateFault as fault:
            if fault.rule == FORGED:
                raise
            return False
        return self.compare(got, input_set.expected, input_set.tolerances).wrong == 0

    def accuse(self, fault: CandidateFault) -> None:
        """It ends with this fault of its own; one of the reference's is raised again."""
        if fault.by is not None and fault.by is not self.session:
            raise fault
        self.fault = self.fault or fault

    def is_in_doubt(self, fault: Fault) -> bool:
        """Whether this verdict may be the work of others, who were in a process before it: what speaks against it, or
        that it could not be replayed though it is right.
        """
        return self.is_shared and (fault is Fault.OK) == (self.trust == OBSERVED)

    def restart(self) -> None:
        """A fresh process of what was started last."""
        assert self._submitted is not None
        self.close()
        self.start(*self._submitted, is_alone=True)

    def run(self, tick: Callable[[], None]) -> None:
        """All input sets; stops at a fault, goes on after a wrong result, because partial credit is wanted. Where the
        options allow it (`check_s`), what is replayed and clearly slower than its reference is spared some: its time is
        looked at next, and `finish` called where that says otherwise.
        """
        if self.fault is not None or self.session is None:
            return
        sets = self.reference.sets
        self._left = [(place, sets[place]) for place in in_secret_order([one.name for one in sets], self._rng)]
        self.order = [input_set for _, input_set in self._left if not self._is_first(input_set)]
        is_asked = self.options.check_s > 0 and not self.reference.declared.deterministic
        self._may_be_spared = is_asked and self.is_replayed
        count = len(self.session.slots)
        # A further one costs its graph.
        self._slots = checked_slots(count, self.options.slots, self._rng)
        self._held_at = self._rng.randrange(1, len(sets))
        seen = SPARED_SETS if self._may_be_spared else len(sets)
        self._recorded, self._overwritten = self._rng.randrange(1, seen), {self._rng.randrange(len(sets))}
        if self._may_be_spared:  # beside any other one: nobody knows that it is over after the first ones
            self._overwritten.add(self._rng.randrange(seen))
        self._run_left(tick)
        if self._trace is not None:
            is_closed = self._backend.is_closed
            found = proof.of_recorded(
                self._trace, is_closed=is_closed, is_extension=self.is_extension or self.launches_unseen
            )
            if found is not None and (found.rule, found.fault) == ("decoy_kernel", Fault.UNPROVEN):
                self.doubt = found
            else:
                self.refuse(found)
            self.refuse(proof.of_forbidden(self._trace, self.reference.declared.forbidden))

    def finish(self, tick: Callable[[], None]) -> None:
        """The sets that it was spared."""
        self._may_be_spared, self.total = False, len(self.reference.sets)
        self._run_left(tick)

    @property
    def spared(self) -> int:
        """Sets that a right candidate has not seen because it is slow."""
        return 0 if self.failed or self.fault is not None or self.is_known else len(self._left)

    def _run_left(self, tick: Callable[[], None]) -> None:
        assert self.session is not None
        is_lean = self.session.gives_back and not self.reference.keeps_sets
        # How long the host needed for its processes, or others had the device, is no time of the candidate's.
        self._deadline = max(self._deadline, time.monotonic() + self.options.deadline_s)
        self._earlier = []  # calls between two runs were others: a process holds the outputs of its last ones only
        try:
            self.session.call(wire.OP_POISON_ON, int(is_lean), self.call_deadline())
            while self._left:
                number = len(self.reference.sets) - len(self._left)
                if self._is_enough(number):
                    self.total = number
                    break
                which, input_set = self._left.pop(0)
                op = wire.OP_TRACE if number == self._recorded and self.is_recorded else wire.OP_RUN
                slot = self._slots[number % len(self._slots)]
                if is_lean:  # a set is made with nothing of the candidate's beside, or with an earlier output only
                    is_held = number == self._held_at
                    self.session.call(wire.OP_FREE, int(is_held), self.call_deadline())
                    self._earlier = self._earlier if is_held else []
                self._wait(input_set.known.load)
                self._answers[which] = self._check(slot, input_set, op, number in self._overwritten)
                self._wait(tick)
            self.session.call(wire.OP_POISON_OFF, 0, self.call_deadline())
        except CandidateFault as fault:
            self.accuse(fault)
        self.compare_repeated()

    def _is_enough(self, done: int) -> bool:
        """A kernel that has failed need not see every set, nor one that has seen them at a verifier, nor one that is
        clearly slow; any other that may be right does, whatever was asked for.
        """
        if self.is_known and not self.failed:
            return done >= KNOWN_SETS
        if self.failed and 0 < self.options.strictness.sets <= done:
            return True
        return self._may_be_spared and done >= SPARED_SETS and self._has_taken_long

    @property
    def _has_taken_long(self) -> bool:
        """By each of its calls, so that being slow now and then spares nothing."""
        return sum(self._calls_s) > self.options.check_s and min(self._calls_s) > _SLOW * self.reference.reference_s

    def _wait(self, tick: Callable[[], None]) -> None:
        """Others on the device may hold us here, and a set may be made anew: that is no time of the candidate's."""
        begun = time.monotonic()
        tick()
        waited = time.monotonic() - begun
        self._deadline += waited
        self._compiling_until += waited if self._compiling_until else 0.0

    def call_deadline(self) -> float:
        """For one call; the whole candidate's deadline cuts it short, unless the reference itself is slow."""
        is_first = not self._is_warm
        one = max(self.one_call_s, self.options.first_call_s) if is_first else self.one_call_s
        now = time.monotonic()
        end = self._compiling_until + self.options.deadline_s if self._compiling_until else self._deadline
        left = max(self._deadline, self._began + 2 * one * self.total, end) - now
        return max(0.05, min(one, left), self._compiling_until - now)

    @property
    def one_call_s(self) -> float:
        """For one timed call."""
        return max(self.options.call_floor_s, self.options.call_factor * self.reference.reference_s)

    def _check(self, slot: int, input_set: InputSet, op: int, overwrite: bool) -> bool:
        assert self.session is not None
        places = self.session.slots[slot]
        place(self.session, slot, input_set)
        outcome = self.session.call(op, slot, self.call_deadline())
        self._is_warm = True
        self._calls_s.append(outcome.elapsed_ns / 1e9)
        got = self.outputs(outcome)
        if not input_set.mutated:
            self.refuse_mutation(places, input_set.blocks)
            self.refuse_overwriting(slot)
            if overwrite and not self.reference.aliases:
                self.refuse_aliasing(slot, outcome, got)
        if self.reference.declared.deterministic and self._is_first(input_set):
            self._refuse_other_bits(got)
        found = self.compare(got, input_set.expected, input_set.tolerances)
        if self.options.outputs != "kept" and self.session.keeps_outputs:
            kept = got if self.reference.keeps_sets else [tensor.cpu() for tensor in got]
            self._earlier = list(zip(outcome.tensors, kept, strict=True))
        if input_set.name == "nominal":
            agrees = all(map(compare.kernelbench, got, input_set.expected))
            self.kernelbench = agrees and self.kernelbench is not False
        if found.wrong == 0:
            self.passed += 1
        else:
            self.failed.append((input_set.name, found))
            self.near += self._is_near(got, input_set)
        if self.worst is None or found.wrong > 0 or found.worst > self.worst.worst:
            self.worst = found
        if outcome.trace is not None:
            self._trace, self.evidence = outcome.trace, proof.evidence(outcome.trace)
        return found.wrong == 0

    def _is_near(self, got: list[torch.Tensor], input_set: InputSet) -> bool:
        factor = self.options.strictness.tolerance
        return (
            factor > 1
            and not self.compare(
                got, input_set.expected, [tolerance.widened(factor) for tolerance in input_set.tolerances]
            ).wrong
        )

    def outputs(self, outcome: ForwardOutcome, session: Judged | None = None) -> list[torch.Tensor]:
        """See `outputs.of_call`."""
        session = session or self.session
        assert session is not None
        return of_call(outcome, session, self.reference)

    def compare(
        self, got: list[torch.Tensor], expected: list[torch.Tensor], tolerances: list[compare.Tolerance]
    ) -> compare.Difference:
        with span("compared"):
            found = [compare.difference(*three) for three in zip(got, expected, tolerances, strict=True)]
        return max(found, key=lambda d: (d.wrong, d.worst), default=compare.Difference(0, 0, 0.0, 0.0))

    def _refuse_copied(self, candidate: Candidate) -> None:
        if not backend(candidate.backend).needs_own_kernels:
            return
        evidence = similarity.copied_reference(self.reference.problem.source, modules_of(candidate.source))
        if evidence:
            self.evidence = evidence
            text = "ModelNew is the reference's own code under other names"
            raise CandidateFault(Fault.CHEATING, text, "reference_copied")

    def _refuse_other_bits(self, got: list[torch.Tensor]) -> None:
        """Of the first set's inputs, which come twice."""
        if not self._first_answer:
            assert self.session is not None
            if not self.reference.keeps_sets:
                got = [tensor.to("cpu", copy=True) for tensor in got]
            elif self.session.reads_in_place:  # the next call overwrites it
                got = [tensor.clone() for tensor in got]
            self._first_answer = got
            return
        if not all(map(compare.same_values, self._first_answer, got)):
            text = "the same inputs gave answers that differ in bits, and the problem declares DETERMINISTIC"
            raise CandidateFault(Fault.INCORRECT, text, "not_deterministic")

    def refuse_mutation(self, places: list[torch.Tensor], blocks: list[torch.Tensor]) -> None:
        for number, (given, block) in enumerate(zip(places, blocks, strict=True)):
            if not compare.same_values(given, block):
                raise CandidateFault(Fault.CHEATING, f"input {number} was changed by forward", "input_mutation")

    def refuse_overwriting(self, slot: int) -> None:
        assert self.session is not None
        if not self._earlier or not self.session.keeps_outputs:
            return
        earlier = [meta for meta, _ in self._earlier]
        metas = self.session.again(wire.OP_HELD, slot, earlier, self.call_deadline())
        for meta, (_, value) in zip(metas, self._earlier, strict=True):
            if not compare.same_values(value, self.session.look(meta)):
                text = "an output returned earlier was overwritten by a later call: allocate a new output in each call"
                raise CandidateFault(Fault.INCORRECT, text, "output_overwritten")

    def refuse_aliasing(self, slot: int, outcome: ForwardOutcome, got: list[torch.Tensor]) -> None:
        """Before its next call.

        :raises CandidateFault: an output lies in an input's memory.
        """
        assert self.session is not None
        if follows_inputs(self.session, slot, outcome, got):
            text = "an output shares memory with an input: it changes when the input is overwritten after the call"
            raise CandidateFault(Fault.INCORRECT, text, "output_alias")

    def compare_repeated(self) -> None:
        """The first set and the last hold the same inputs: one answer right and one wrong is carried state."""
        answers = {self._answers.get(which) for which, s in enumerate(self.reference.sets) if self._is_first(s)}
        self.carries_state = answers == {True, False}

    def _is_first(self, input_set: InputSet) -> bool:
        return input_set.known is self.reference.sets[0].known

    def refuse(self, finding: proof.Finding | None) -> None:
        """Only a candidate that is right so far: a wrong one has its verdict."""
        if finding is not None and not self.failed and self.fault is None:
            self.evidence = finding.evidence
            self.fault = CandidateFault(finding.fault, finding.text, finding.rule)


def checked_slots(count: int, most: int, rng: random.Random) -> list[int]:
    """Places for inputs that sets are checked in, in secret order: the first, which may be all that is timed, and a
    secret few of the others.
    """
    chosen = [0, *rng.sample(range(1, count), min(count, most) - 1)]
    rng.shuffle(chosen)
    return chosen


DEGENERATE_NOTE = "degenerate problem: zeros, a constant or an unchanged input would be right on its inputs"
EXACT_NOTE = "equal to the last bit"
