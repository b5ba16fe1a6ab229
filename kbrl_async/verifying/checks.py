"""One candidate against its reference: runs every secret input set and records what it finds.

::

    start ─▶ for each set, in secret order: write inputs ─▶ call ─▶ freeze ─▶ read and compare outputs,
             compare inputs with the originals, compare the previous output with what it was
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kbrl_async.sandbox import Zygote
from kbrl_async.verifying import compare, wire
from kbrl_async.verifying.options import BenchOptions
from kbrl_async.verifying.reference import InputSet, Reference
from kbrl_async.verifying.session import CandidateFault, Outcome, Session
from protocols.records import Candidate


class Checker:
    """The trusted side's view of one candidate. `fault` is the first thing that ended or disqualified it."""

    def __init__(self, zygote: Zygote, reference: Reference, options: BenchOptions, rng: random.Random) -> None:
        self.reference, self.options = reference, options
        self._zygote, self._rng = zygote, rng
        self.session: Session | None = None
        self.fault: CandidateFault | None = None
        self.passed = 0
        self.total = len(reference.sets)
        self.worst: compare.Difference | None = None
        self.failed: list[tuple[str, compare.Difference]] = []
        self._earlier: list[tuple[wire.TensorMeta, torch.Tensor]] = []
        self.isolation: tuple[str, tuple[str, ...]] = ("none", ("the candidate was not started",))

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def start(self, candidate: Candidate, artifacts: dict[str, Path]) -> None:
        """Fork, confine and build the candidate."""
        paths = {key: str(path) for key, path in artifacts.items()}
        setup = self.reference.setup(candidate.source, "ModelNew", paths)
        self._began = time.monotonic()
        self._deadline = self._began + self.options.deadline_s
        fds = (self.reference.weights_fd,)
        try:
            self.session = Session(self._zygote, setup, fds, self.options.limits, self.options.deadline_s)
            self.isolation = (self.session.isolation.level, self.session.isolation.missing)
            reference = self.reference
            self.session.attach(reference.tree, reference.examples, self.options.slots, reference.copies)
        except CandidateFault as fault:
            self.fault = fault

    def restart(self, candidate: Candidate, artifacts: dict[str, Path]) -> None:
        """A fresh process for a second measurement."""
        self.close()
        self.start(candidate, artifacts)

    def run(self, tick: Callable[[], None]) -> None:
        """All input sets; stops at a fault, goes on after a wrong result, because partial credit is wanted."""
        if self.fault is not None or self.session is None:
            return
        sets = list(self.reference.sets)
        self._rng.shuffle(sets)
        try:
            self.session.call(wire.OP_POISON_ON, 0, self.call_deadline())
            for number, input_set in enumerate(sets):
                self._check(number % self.options.slots, input_set)
                tick()
            self.session.call(wire.OP_POISON_OFF, 0, self.call_deadline())
        except CandidateFault as fault:
            self.fault = fault

    def call_deadline(self) -> float:
        """For one call; the whole candidate's deadline cuts it short, unless the reference itself is slow."""
        one = self.one_call_s
        left = max(self._deadline, self._began + 2 * one * self.total) - time.monotonic()
        return max(0.05, min(one, left))

    @property
    def one_call_s(self) -> float:
        """For one timed call."""
        return max(self.options.call_floor_s, self.options.call_factor * self.reference.reference_s)

    def _check(self, slot: int, input_set: InputSet) -> None:
        assert self.session is not None
        places = self.session.slots[slot]
        for place, block in zip(places, input_set.blocks, strict=True):
            place.copy_(block)
        outcome = self.session.call(wire.OP_RUN, slot, self.call_deadline())
        got = self.outputs(outcome)
        if not input_set.mutated:
            self._refuse_mutation(places, input_set.blocks)
            self._refuse_overwriting()
        found = self.compare(got, input_set.expected, input_set.tolerances)
        self._earlier = list(zip(outcome.tensors, got, strict=True))
        if found.wrong == 0:
            self.passed += 1
        else:
            self.failed.append((input_set.name, found))
        if self.worst is None or found.wrong > 0 or found.worst > self.worst.worst:
            self.worst = found

    def outputs(self, outcome: Outcome) -> list[torch.Tensor]:
        """The outputs as tensors of ours, after their structure, types and shapes were found right."""
        assert self.session is not None
        reference = self.reference
        expected = reference.sets[0].expected
        if outcome.tree != reference.out_tree:
            if len(outcome.tensors) != len(expected):
                text = f"forward returned {len(outcome.tensors)} tensors, the reference returns {len(expected)}"
                raise CandidateFault("incorrect", text, "structure")
            if not _same_structure(outcome.tree, reference.out_tree):
                raise CandidateFault("incorrect", "forward returns another structure than the reference", "structure")
        for meta, wanted, kind in zip(outcome.tensors, expected, reference.kinds, strict=True):
            _check_meta(meta, wanted, kind)
        return [self.session.read(meta) for meta in outcome.tensors]

    def compare(
        self, got: list[torch.Tensor], expected: list[torch.Tensor], tolerances: list[compare.Tolerance]
    ) -> compare.Difference:
        found = [compare.difference(*three) for three in zip(got, expected, tolerances, strict=True)]
        return max(found, key=lambda d: (d.wrong, d.worst), default=compare.Difference(0, 0, 0.0, 0.0))

    def _refuse_mutation(self, places: list[torch.Tensor], blocks: list[torch.Tensor]) -> None:
        for number, (place, block) in enumerate(zip(places, blocks, strict=True)):
            if not _same_bytes(place, block):
                raise CandidateFault("cheating", f"input {number} was changed by forward", "input_mutation")

    def _refuse_overwriting(self) -> None:
        assert self.session is not None
        if self.session.copies:  # what could be read again is our own copy
            return
        for meta, value in self._earlier:
            if not _same_bytes(self.session.read(meta), value):
                text = "an output returned earlier was overwritten by a later call: allocate a new output in each call"
                raise CandidateFault("incorrect", text, "output_overwritten")


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return True
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))  # NaN equals its own bytes


def _same_structure(got: wire.Tree, expected: wire.Tree) -> bool:
    """Plain values are compared as values; a list may stand for a tuple."""
    if got[0] == "V" and expected[0] == "V":
        return bool(
            got[1] == expected[1] or abs(float(got[1]) - float(expected[1])) <= 1e-4 * (1 + abs(float(expected[1])))
        )
    if {got[0], expected[0]} <= {"L", "U"}:
        return len(got[1]) == len(expected[1]) and all(map(_same_structure, got[1], expected[1]))
    if got[0] == expected[0] == "D":
        return got[1].keys() == expected[1].keys() and all(_same_structure(got[1][k], expected[1][k]) for k in got[1])
    return bool(got == expected)


def _check_meta(meta: wire.TensorMeta, wanted: torch.Tensor, kind: str) -> None:
    if meta.kind not in ("Tensor", kind):
        raise CandidateFault("cheating", f"the output is a {meta.kind}, not a plain torch.Tensor", "tensor_subclass")
    if tuple(meta.shape) != tuple(wanted.shape):
        text = f"the output has shape {tuple(meta.shape)}, the reference {tuple(wanted.shape)}"
        raise CandidateFault("incorrect", text, "shape")
    dtype = str(wanted.dtype).removeprefix("torch.")
    if meta.dtype != dtype:
        raise CandidateFault("incorrect", f"the output is {meta.dtype}, the reference {dtype}", "dtype")
    if len(meta.strides) != len(meta.shape):
        raise CandidateFault("cheating", "the output's strides do not fit its shape", "forged_result")
