"""What a problem is checked against: its reference child, secret input sets, expected outputs and tolerances.

A reference child never sees candidate code; several candidates of a problem use one.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import OrderedDict

import torch

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.verify import inputs, values, wire
from kbrl_async.kernels.verify.device import Device, device_of
from kbrl_async.kernels.verify.inputs import host_bytes
from kbrl_async.kernels.verify.memory import give_back, may_read_children, memory_file, seal
from kbrl_async.kernels.verify.options import BenchOptions, Tick, no_tick
from kbrl_async.kernels.verify.session import CandidateFault, Outcome, Session
from kbrl_async.kernels.verify.sets import InputSet, SetMaker
from protocols.records import Problem


class Reference:
    """A living reference child and everything derived from it."""

    def __init__(
        self, zygote: Zygote, problem: Problem, options: BenchOptions, rng: random.Random, tick: Tick = no_tick
    ) -> None:
        self.problem, self._options, self._rng, self.tick = problem, options, rng, tick
        self.seed = rng.getrandbits(31)
        self.uses = 0
        try:
            self.session = self._begin(zygote)
        except CandidateFault as fault:
            raise ProblemError(f"the reference of {problem.problem_id} fails: {fault.text[:300]}") from fault
        self.ready = self.session.ready
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def _begin(self, zygote: Zygote) -> Session:
        """The reference child, its weights published."""
        options = self._options
        self.copies = options.copy_outputs or not may_read_children()
        self.weights_fd = self._draw_fd = -1
        setup = wire.Setup(self.problem.source, "Model", self.seed)
        with contextlib.ExitStack() as undo:  # nobody else closes what a failure leaves open: no Reference comes to be
            undo.callback(self._close_files)
            self.weights_fd = memory_file("weights")
            self._draw_fd = memory_file("draws")
            fds = (self.weights_fd, self._draw_fd)
            session = Session(zygote, setup, fds, options.limits, options.reference_deadline_s)
            undo.callback(session.close)
            seal(self.weights_fd)
            undo.pop_all()
        return session

    @property
    def host_bytes(self) -> int:
        """Host memory of its secrets: input sets with what is expected of them, and draws."""
        return self.pool.host_bytes + sum(host_bytes([*one.blocks, *one.expected]) for one in self.sets)

    @property
    def device_bytes(self) -> int:
        """Memory of a GPU that it holds, its child's own aside."""
        return 0

    def close(self) -> None:
        self.session.close()
        self._close_files()

    def _close_files(self) -> None:
        files, self.weights_fd, self._draw_fd = (self.weights_fd, self._draw_fd), -1, -1
        for fd in files:  # once only: the numbers may be another file's by the second time
            with contextlib.suppress(OSError):
                os.close(fd)

    def setup(self, source: str, entry: str, artifacts: dict[str, str], backend: str = "") -> wire.Setup:
        """For a child that gets this reference's seed, constructor arguments and weights."""
        ready = self.ready
        return wire.Setup(
            source, entry, self.seed, artifacts, ready.init, ready.init_tensors, ready.weights, backend=backend
        )

    def open(
        self,
        zygote: Zygote,
        source: str,
        entry: str,
        artifacts: dict[str, str],
        deadline_s: float,
        backend: str = "",
    ) -> Session:
        """A child with this reference's weights; `attach` gives it its arena."""
        setup = self.setup(source, entry, artifacts, backend)
        return Session(zygote, setup, (self.weights_fd,), self._options.limits, deadline_s)

    def attach(self, session: Session) -> None:
        session.attach(self.tree, self.examples, self._options.slots, self.copies)

    def release(self, twin: Session) -> None:
        """A twin is needed no more."""
        twin.close()

    def twin(self, zygote: Zygote) -> Session:
        """A fresh child of the reference with the history of a candidate that was just checked: only such
        two can be timed against each other, because an older process has another heap and other page tables."""
        session = self.open(zygote, self.problem.source, "Model", {}, self._options.reference_deadline_s)
        try:
            self.attach(session)
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
        draws = []
        for _ in range(max(2, self._options.pool)):
            self.tick()
            draws.append(self._draw())
        self._attach_own(draws)
        self.pool = inputs.Pool(draws)
        maker = SetMaker(self, self.problem.problem_id, self._rng)
        self.sets: list[InputSet] = maker.make(draws, self._draw, self.tick)
        self.reference_s, self.out_tree, self.kinds = maker.reference_s, maker.out_tree, maker.kinds
        self.strides, self.aliases = maker.strides, maker.aliases

    def _attach_own(self, draws: list[list[torch.Tensor]]) -> None:
        self.attach(self.session)

    def ask(self, op: int, blocks: list[torch.Tensor]) -> tuple[Outcome, list[torch.Tensor]]:
        """One call on these inputs (slot 0): its outcome, and copies of its outputs."""
        for slot, block in zip(self.session.slots[0], blocks, strict=True):
            slot.copy_(block)
        outcome = self.session.call(op, 0, self._options.reference_deadline_s)
        return outcome, self.read(outcome)

    def read(self, outcome: Outcome) -> list[torch.Tensor]:
        """Copies of the outputs of a call of the reference."""
        return [self.session.read(meta) for meta in outcome.tensors]


class References:
    """A small LRU of references, one per problem source."""

    def __init__(self, zygote: Zygote, options: BenchOptions, rng: random.Random, device: Device | None = None) -> None:
        self._zygote, self._options, self._rng = zygote, options, rng
        self._device = device or device_of(options.device)
        self._kept: OrderedDict[str, Reference] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, problem: Problem, tick: Tick = no_tick) -> Reference:
        """`tick` is called between the steps of making one, which takes seconds."""
        reference = self._kept.pop(problem.source, None)
        if reference is not None and reference.uses >= self._options.reuse:
            reference.tick = tick
            try:
                reference.refresh()
            except (ProblemError, InfraError):
                reference.close()
                raise
            except OSError as error:  # its child was killed, and the way to it is closed
                reference.close()
                cause = f"the reference of {problem.problem_id} is gone ({error})"
                raise InfraError(cause, "It is made anew for the next candidate") from error
        if reference is None:
            reference = self._device.reference(self._zygote, problem, self._options, self._rng, self._kept, tick)
        reference.uses += 1
        self._kept[problem.source] = reference
        while self._are_too_many():
            self._kept.popitem(last=False)[1].close()
            give_back()
        return reference

    def _are_too_many(self) -> bool:
        """By number, or by what they take: problems differ by a factor of a thousand."""
        if len(self._kept) <= 1:
            return False
        if len(self._kept) > self._options.references:
            return True
        if sum(reference.host_bytes for reference in self._kept.values()) > self._options.reference_bytes:
            return True
        on_device = sum(reference.device_bytes for reference in self._kept.values())
        return on_device > 0 and on_device > self._device.room(self._options)

    def settle(self) -> None:
        """Returns when no child that waits for its candidate is still making its context."""
        self._device.settle()

    def drop(self, reference: Reference) -> None:
        """Its child is in doubt: forget it."""
        self._kept.pop(reference.problem.source, None)
        reference.close()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()
        self._device.close()
