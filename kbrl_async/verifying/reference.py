"""What a problem is checked against: its reference child, secret input sets, expected outputs and tolerances.

A reference child never sees candidate code; several candidates of a problem use one.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import OrderedDict

import msgspec
import torch

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.sandbox import Zygote
from kbrl_async.verifying import compare, inputs, values, wire
from kbrl_async.verifying.memory import may_read_children, memory_file, seal
from kbrl_async.verifying.options import BenchOptions
from kbrl_async.verifying.session import CandidateFault, Outcome, Session
from protocols.records import Problem


class InputSet(msgspec.Struct, frozen=True):
    name: str
    blocks: list[torch.Tensor]
    """Inputs as flat memory blocks, the originals: children only get copies."""
    expected: list[torch.Tensor]
    tolerances: list[compare.Tolerance]
    mutated: bool
    """The reference itself changes its inputs."""


class Reference:
    """A living reference child and everything derived from it."""

    def __init__(self, zygote: Zygote, problem: Problem, options: BenchOptions, rng: random.Random) -> None:
        self.problem, self._options, self._rng = problem, options, rng
        self.seed = rng.getrandbits(31)
        self.weights_fd, self._draw_fd = memory_file("weights"), memory_file("draws")
        self.uses = 0
        self.copies = options.copy_outputs or not may_read_children()
        setup = wire.Setup(problem.source, "Model", self.seed)
        fds = (self.weights_fd, self._draw_fd)
        try:
            self.session = Session(zygote, setup, fds, options.limits, options.reference_deadline_s)
        except CandidateFault as fault:
            os.close(self.weights_fd)
            os.close(self._draw_fd)
            raise ProblemError(f"the reference of {problem.problem_id} fails: {fault.text[:300]}") from fault
        seal(self.weights_fd)
        self.ready = self.session.ready
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.session.close()
        for fd in (self.weights_fd, self._draw_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    def setup(self, source: str, entry: str, artifacts: dict[str, str]) -> wire.Setup:
        """For a child that gets this reference's seed, constructor arguments and weights."""
        ready = self.ready
        return wire.Setup(source, entry, self.seed, artifacts, ready.init, ready.init_tensors, ready.weights)

    def twin(self, zygote: Zygote) -> Session:
        """A fresh child of the reference with the history of a candidate that was just checked: only such
        two can be timed against each other, because an older process has another heap and other page tables."""
        setup, limits = self.setup(self.problem.source, "Model", {}), self._options.limits
        session = Session(zygote, setup, (self.weights_fd,), limits, self._options.reference_deadline_s)
        try:
            session.attach(self.tree, self.examples, self._options.slots, self.copies)
            session.call(wire.OP_POISON_ON, 0, self._options.reference_deadline_s)
            for number, input_set in enumerate(self.sets):
                slot = number % self._options.slots
                for place, block in zip(session.slots[slot], input_set.blocks, strict=True):
                    place.copy_(block)
                session.call(wire.OP_RUN, slot, self._options.reference_deadline_s)
            session.call(wire.OP_POISON_OFF, 0, self._options.reference_deadline_s)
        except BaseException:
            session.close()
            raise
        return session

    def refresh(self) -> None:
        """Draw new secrets and compute what is expected of them."""
        try:
            self._prepare()
        except CandidateFault as fault:
            raise ProblemError(f"the reference of {self.problem.problem_id} fails: {fault.text[:300]}") from fault
        self.uses = 0

    def _draw(self) -> list[torch.Tensor]:
        seed = self._rng.getrandbits(31)
        self.tree, tensors = self.session.draw(seed, self._draw_fd, self._options.reference_deadline_s)
        self.examples = tensors
        return [values.flat(tensor) for tensor in tensors]

    def _prepare(self) -> None:
        draws = [self._draw() for _ in range(max(2, self._options.pool))]
        self.session.attach(self.tree, self.examples, self._options.slots, self.copies)
        self.pool = inputs.Pool(draws)
        self.sets: list[InputSet] = []
        self.reference_s = 0.0
        self.nominal_scales: list[float] = []
        for number, kind in enumerate(inputs.KINDS):
            draw = draws[number % len(draws)]
            made = self._make_set(kind, inputs.vary(draw, kind, self._rng))
            if made is None:
                made = self._make_set(inputs.KINDS[0], self._draw())
            if made is None:
                raise ProblemError(f"the reference of {self.problem.problem_id} gives no finite output")
            self.sets.append(made)

    def _make_set(self, kind: inputs.Kind, blocks: list[torch.Tensor]) -> InputSet | None:
        """None where the reference does not accept these inputs, or answers with values that are not finite."""
        try:
            outcome, expected = self._run(wire.OP_RUN, blocks)
        except CandidateFault:
            if kind.name == "nominal":
                raise
            return None
        if kind.name != "nominal" and not all(_is_finite(tensor) for tensor in expected):
            return None
        self.reference_s = max(self.reference_s, outcome.elapsed_ns / 1e9) if self.sets else outcome.elapsed_ns / 1e9
        self.out_tree = outcome.tree
        self.kinds = [meta.kind for meta in outcome.tensors]
        mutated = any(not torch.equal(a, b) for a, b in zip(self.session.slots[0], blocks, strict=True))
        if not self.nominal_scales:
            self.nominal_scales = [compare.output_scale(tensor) for tensor in expected]
        wide = self._wide(blocks)
        tolerances = [
            compare.tolerance(tensor, wide[i] if wide else None, self.nominal_scales[i])
            for i, tensor in enumerate(expected)
        ]
        return InputSet(kind.name, blocks, expected, tolerances, mutated)

    def _run(self, op: int, blocks: list[torch.Tensor]) -> tuple[Outcome, list[torch.Tensor]]:
        for slot, block in zip(self.session.slots[0], blocks, strict=True):
            slot.copy_(block)
        outcome = self.session.call(op, 0, self._options.reference_deadline_s)
        return outcome, self.read(outcome)

    def read(self, outcome: Outcome) -> list[torch.Tensor]:
        """Copies of the outputs of a call of the reference."""
        return [self.session.read(meta) for meta in outcome.tensors]

    def _wide(self, blocks: list[torch.Tensor]) -> list[torch.Tensor] | None:
        try:
            return self._run(wire.OP_DOUBLE, blocks)[1]
        except CandidateFault:  # a reference that has no fp64 version has no honest error either
            return None


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


class References:
    """A small LRU of references, one per problem source."""

    def __init__(self, zygote: Zygote, options: BenchOptions, rng: random.Random) -> None:
        self._zygote, self._options, self._rng = zygote, options, rng
        self._kept: OrderedDict[str, Reference] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, problem: Problem) -> Reference:
        reference = self._kept.pop(problem.source, None)
        if reference is not None and reference.uses >= self._options.reuse:
            try:
                reference.refresh()
            except (ProblemError, InfraError):
                reference.close()
                raise
        if reference is None:
            reference = Reference(self._zygote, problem, self._options, self._rng)
        reference.uses += 1
        self._kept[problem.source] = reference
        while len(self._kept) > self._options.references:
            self._kept.popitem(last=False)[1].close()
        return reference

    def drop(self, reference: Reference) -> None:
        """Its child is in doubt: forget it."""
        self._kept.pop(reference.problem.source, None)
        reference.close()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()
