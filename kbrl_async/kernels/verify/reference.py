"""What a problem is checked against: its reference child, secret input sets, expected outputs and tolerances.

A reference child never sees candidate code; several candidates of a problem use one.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.verify import compare, values, wire
from kbrl_async.kernels.verify.cpu.replay import CpuReplays, CpuReplaySession, Judging
from kbrl_async.kernels.verify.forecast import forecast
from kbrl_async.kernels.verify.fresh import Pool
from kbrl_async.kernels.verify.hoarding import Crowded
from kbrl_async.kernels.verify.input_set import InputSet, place
from kbrl_async.kernels.verify.inputs import host_bytes, kinds_for
from kbrl_async.kernels.verify.known import AskedSet, Draws, Held, Recent, Redrawn, Sizes, outlines, size_of
from kbrl_async.kernels.verify.memory import copied, may_read_children, memory_file, seal
from kbrl_async.kernels.verify.options import BenchOptions, Tick, no_tick
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome, Judged, Session, Submission
from kbrl_async.kernels.verify.sets import Change, SetMaker
from protocols.records import Problem


class ReferenceChild:
    """The reference child of all workloads of one module, and its weights."""

    def __init__(self, module: Problem) -> None:
        self.module = module
        self.first: Reference | None = None
        """Who has made the child, and ends it."""
        self.attached = 0
        """By `id`: whose inputs it has places for."""


class Reference:
    """A living reference child and everything derived from it."""

    records: ClassVar[bool] = True
    """Whether recorded and muted runs show that a candidate's own kernels do the work; else `Device.prove` does."""

    lends: ClassVar[bool] = False
    """Whether what its child holds of a set serves the bench as well."""

    frees: ClassVar[bool] = False
    """Whether a candidate's process gives its outputs back before a set is made again: see `Sizes`."""

    def __init__(
        self,
        zygote: Zygote,
        problem: Problem,
        options: BenchOptions,
        rng: random.Random,
        tick: Tick = no_tick,
        *,
        share: ReferenceChild | None = None,
        inputs: str = "",
    ) -> None:
        """`share`: a child that several workloads have together; `inputs`: the text that makes those of this one."""
        self.problem, self._options, self._rng, self.tick = problem, options, rng, tick
        self._share, self._inputs = share or ReferenceChild(problem), inputs
        first = self._share.first
        self.seed: int = rng.getrandbits(31) if first is None else first.seed
        self.sets: list[InputSet] = []
        self._rehearsals: list[InputSet] = []
        self.examples: list[torch.Tensor] = []
        self.wanted: list[torch.Tensor] = []
        self._replays = CpuReplays(options)
        self.needed = self.inside = 0
        """Bytes: at the peak of a verification, as predicted; and of a GPU, what its forward takes beside what it is
        given and what it answers."""
        try:
            self.session = self._begin(zygote) if first is None else self._shared(first)
        except CandidateFault as fault:
            raise self._failed(fault) from fault
        self._share.first = first or self
        self.ready = self.session.ready
        try:
            self.refresh()
        except Crowded:
            self.retire()
            raise
        except BaseException:
            self.close()
            raise

    def _begin(self, zygote: Zygote) -> Session:
        """The reference child, its weights published."""
        options = self._options
        self.copies = options.copy_outputs or not may_read_children()
        self.weights_fd = self._draw_fd = -1
        setup = wire.Setup(self._share.module.source, "Model", self.seed)
        with contextlib.ExitStack() as undo:  # nobody else closes what a failure leaves open: no Reference comes to be
            undo.callback(self._close_files)
            self.weights_fd = memory_file("weights")
            self._draw_fd = memory_file("draws")
            fds = (self.weights_fd, self._draw_fd)
            with span("a reference's process"):
                session = Session(zygote, setup, fds, options.limits, options.reference_deadline_s)
            undo.callback(session.close)
            seal(self.weights_fd)
            undo.pop_all()
        return session

    def _shared(self, first: Reference) -> Session:
        """That of another workload, with its weights and its file for draws."""
        self.copies, self.weights_fd, self._draw_fd = first.copies, first.weights_fd, first._draw_fd
        return first.session

    @property
    def module_id(self) -> int:
        """The same for all workloads of one module: a candidate with these weights serves them all."""
        return id(self._share)

    @property
    def host_bytes(self) -> int:
        """Host memory of its secrets: input sets with what is expected of them, and draws."""
        sets = (*self.sets, *self._rehearsals)
        return host_bytes([*self.pool.tensors, *(tensor for one in sets for tensor in one.known.held)])

    @property
    def device_bytes(self) -> int:
        """Memory of a GPU that it holds, its child's own aside."""
        return 0

    @property
    def far_bytes(self) -> int:
        """Memory of the host that is a GPU's, for want of its own."""
        return 0

    def close(self) -> None:
        """The child goes with the first of those that share it."""
        self._replays.close()
        if self._share.first is self:
            self._share.first = None
            self.session.close()
            self._close_files()

    def retire(self) -> None:
        """Closed though it is sound: what it ran in may serve another."""
        self.close()

    def _close_files(self) -> None:
        files, self.weights_fd, self._draw_fd = (self.weights_fd, self._draw_fd), -1, -1
        for fd in files:  # once only: the numbers may be another file's by the second time
            with contextlib.suppress(OSError):
                os.close(fd)

    def setup(self, code: Submission) -> wire.Setup:
        """For a child that gets this reference's seed, constructor arguments and weights."""
        ready = self.ready
        given = ready.init, ready.init_tensors, ready.weights
        return wire.Setup(code.source, code.entry, self.seed, code.artifacts, *given, backend=code.backend)

    def open(self, zygote: Zygote, code: Submission, deadline_s: float) -> Session:
        """A child with this reference's weights; `attach` gives it its arena."""
        setup = self.setup(code)
        weights = copied(self.weights_fd)
        try:
            return Session(zygote, setup, (weights,), self._options.limits, deadline_s)
        finally:
            os.close(weights)

    def attach(self, session: Judged) -> None:
        assert isinstance(session, Session)
        session.attach(self.tree, self.examples, self.slots, self.copies)

    def replayed(self, zygote: Zygote, session: Session, artifacts: Mapping[str, Path], judge: Judging) -> Session:
        """A child that does again what the candidate of `session` does, and none of its Python.

        :raises Refused: there can't be one.
        """
        return self._replays.of(self, zygote, session, artifacts, judge)

    def release(self, twin: Session) -> None:
        """A twin is needed no more."""
        if isinstance(twin, CpuReplaySession):
            self._replays.keep(twin)
        else:
            twin.close()

    def twin(self, zygote: Zygote, is_replayed: bool = False) -> Session:
        """A fresh child of the reference with the history of a candidate that was just checked: only such
        two can be timed against each other, because an older process has another heap and other page tables."""
        if is_replayed:
            return self._replays.twin(self, zygote)
        session = self.open(zygote, Submission(self.problem.source, entry="Model"), self._options.reference_deadline_s)
        try:
            self.attach(session)
            self.check(session)
        except BaseException:
            session.close()
            raise
        return session

    def check(self, session: Session) -> bool:
        """All input sets through a child of the reference; whether it is right on them."""
        wrong, limit_s = 0, self._options.reference_deadline_s
        session.call(wire.OP_POISON_ON, 0, limit_s)
        for number, input_set in enumerate(self.sets):
            slot = number % len(session.slots)
            place(session, slot, input_set)
            outcome = session.call(wire.OP_RUN, slot, limit_s)
            got = [session.read(meta) for meta in outcome.tensors]
            both = zip(got, input_set.expected, input_set.tolerances, strict=True)
            wrong += not all(compare.agrees(*three) or not compare.difference(*three).wrong for three in both)
        session.call(wire.OP_POISON_OFF, 0, limit_s)
        return wrong == 0

    def renew(self) -> None:
        """Before a timed call: a new draw where without one its inputs would not be new."""
        if self.pool.needs_draws:
            self.pool.replace(self._rng.getrandbits(31), self._draw, self._rng)

    def rehearsal(self, number: int) -> InputSet:
        """Inputs for recording. They are used for nothing else: whoever keeps answers to them has none to any other."""
        while len(self._rehearsals) <= number:
            self._rehearsals.append(self.drawn())
        return self._rehearsals[number]

    def drawn(self) -> InputSet:
        """Inputs that nobody has seen, such as the problem draws."""
        seed, first = self._rng.getrandbits(31), self.sets[0]

        def make() -> Held:
            blocks = self._redraw(seed)
            return self.held(self.own(blocks) if first.mutated else blocks)

        known = make() if self.keeps_sets else AskedSet(self._recent, make)
        return InputSet("drawn", known, first.tolerances, first.mutated)

    def refresh(self) -> None:
        """Draw new secrets and compute what is expected of them."""
        self._replays.forget_twin()
        try:
            self._prepare()
        except CandidateFault as fault:
            raise self._failed(fault) from fault

    def _failed(self, fault: CandidateFault) -> ProblemError:
        return ProblemError(f"the reference of {self.problem.problem_id} fails: {fault.text[:300]}")

    def _redraw(self, seed: int) -> list[torch.Tensor]:
        """Where sets are not kept, maybe lent: see `Redrawn`."""
        return self._draw(seed) if self.keeps_sets else self._lend(seed)

    def _lend(self, seed: int) -> list[torch.Tensor]:
        return self._draw(seed)

    def own(self, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same values where nothing that is drawn or asked next overwrites them."""
        return blocks

    def held(self, blocks: list[torch.Tensor]) -> Held:
        """These inputs with what the reference answers, as long as nothing else is drawn or asked."""
        return Held(blocks, self.ask(wire.OP_RUN, blocks)[1])

    def _draw(self, seed: int) -> list[torch.Tensor]:
        limit_s = self._options.reference_deadline_s
        self.tree, tensors = self.session.draw(seed, self._draw_fd, limit_s, self._inputs)
        self.examples = tensors if self.keeps_sets else outlines(tensors)
        return [values.flat(tensor) for tensor in tensors]

    def _prepare(self) -> None:
        self._forget()
        self.keeps_sets = self.widens = True
        with span("a reference's draws"):
            draws = self._draws()
            self._attach_own(draws)
        self._share.attached = id(self)
        maker = SetMaker(
            self, self.problem.problem_id, self._rng, self.problem.source, self.tree, is_light=self._options.is_light
        )
        self.pool = Pool(draws, self.examples, self._rng, maker.fixed)
        with span("a reference's sets"):
            kinds = kinds_for(self.examples)
            tick = forecast(self.tick, self.problem.problem_id, len(kinds), lambda: self.keeps_sets)
            self.sets = maker.make(draws, self.pool, self._redraw, tick, self._planned)
        self.reference_s, self.out_tree, self.kinds = maker.reference_s, maker.out_tree, maker.kinds
        self.strides, self.aliases, self.wanted = maker.strides, maker.aliases, maker.wanted
        self.declared = maker.declared
        self._rehearsals = []

    def _forget(self) -> None:
        """The secrets of before: with those that are made next they would be in memory twice."""
        self.sets, self._rehearsals, self._recent = [], [], Recent()
        self.examples = outlines(self.examples)
        with contextlib.suppress(AttributeError):  # at first there is none
            del self.pool

    def _draws(self) -> Draws:
        """Secret draws; of inputs so large that not all can be kept, two that are drawn again when they are needed.
        Nothing is drawn to know how large they are where that is known: the arena is there already, beside which a draw
        that may be kept gets memory of its own.
        """
        seeds = [self._rng.getrandbits(31) for _ in range(max(2, self._options.pool))]
        self.tick()
        first = None if self.examples else self._draw(seeds[0])
        self._planned(self.wanted)
        if not self.keeps_sets:
            self.examples = outlines(self.examples)
            return Redrawn(seeds[:2], self._draw, self._lend)
        return [self._draw(seeds[0]) if first is None else first, *self._more_draws(seeds[1:])]

    def _more_draws(self, seeds: list[int]) -> Draws:
        draws = []
        for seed in seeds:
            self.tick()
            draws.append(self._draw(seed))
        return draws

    def _planned(self, outputs: list[torch.Tensor], mutated: bool = False) -> tuple[bool, bool]:
        """Whether sets are kept, and the reference is run in fp64. `mutated`: it changes its inputs.

        :raises ProblemError: there is no memory even for one set at a time.
        """
        inputs = size_of(self.examples)
        sizes, memory = Sizes(inputs, size_of(outputs), self.state_bytes), self.plannable_bytes()
        if outputs:  # before that nothing is known of draws either
            owned = inputs if mutated or not self.lends else 0
            wide = max(
                (8 // one.element_size() for one in (*outputs, *self.examples) if one.is_floating_point()), default=1
            )
            more = {"drawn": self.drawn_beside, "owned": owned, "apart": self.kept_draws, "wide": max(1, wide)}
            sizes = msgspec.structs.replace(sizes, frees=self.frees, **more)
        sizes = self._placed(sizes, memory)
        sizes.refuse(self.problem.problem_id, memory)
        self.keeps_sets &= sizes.are_kept(memory, self._options.pool, self._options.slots)
        self.widens &= sizes.widened <= memory
        self.needed = sizes.peak(self.keeps_sets, self.widens, self._options.pool, self._options.slots)
        return self.keeps_sets, self.widens

    def _placed(self, sizes: Sizes, memory: int) -> Sizes:
        """On a processor everything is the host's."""
        return sizes

    @property
    def state_bytes(self) -> int:
        """Of its weights, without what lies between them."""
        return sum(values.size_of_meta(meta) for _, meta in self.ready.weights)

    @property
    def drawn_beside(self) -> int:
        """Bytes that a draw takes beside the memory that it goes to."""
        return size_of(self.examples)

    @property
    def kept_draws(self) -> int:
        """Bytes of draws that are kept beside sets that are not."""
        return 0

    def plannable_bytes(self) -> int:
        """Bytes that this bench may plan with for one problem: a child may have no more than its limit."""
        free = psutil.virtual_memory().available
        return int(self._options.memory_share * min(free, 2 * self._options.limits.memory_bytes))

    @property
    def slots(self) -> int:
        """Places for inputs in each process."""
        return self._options.slots if self.keeps_sets else 1

    def _attach_own(self, draws: Draws) -> None:
        self.attach(self.session)

    def claim(self) -> None:
        """Before a call of the child: the one before may have been another workload's."""
        if self._share.attached != id(self):
            self.attach(self.session)
            self._share.attached = id(self)

    def ask(
        self, op: int, blocks: list[torch.Tensor], change: Change | None = None
    ) -> tuple[ForwardOutcome, list[torch.Tensor]]:
        """One call on these inputs (slot 0), changed there: its outcome, and copies of its outputs."""
        outcome = self._run(op, blocks, change)
        return outcome, self.read(outcome)

    def _run(self, op: int, blocks: list[torch.Tensor], change: Change | None = None) -> ForwardOutcome:
        """Its outputs can be read then."""
        self.claim()
        places = self.session.slots[0]
        for where, block in zip(places, blocks, strict=True):
            if where.data_ptr() != block.data_ptr():
                where.copy_(block)
        if change is not None:
            change(places)
        outcome = self.session.call(op, 0, self._options.reference_deadline_s)
        if not self.keeps_sets:
            self.forget_outputs()
        return outcome

    def recall(self) -> None:
        """The outputs of the last call of `ask` are in the child again, where they were given back."""
        if not self.keeps_sets:
            self.session.call(wire.OP_RUN, 0, self._options.reference_deadline_s)

    def forget_outputs(self) -> None:
        """Of the reference's child, where memory is short, not those that the bench reads; on a processor others have
        none of its.
        """

    def read(self, outcome: ForwardOutcome) -> list[torch.Tensor]:
        """Copies of the outputs of a call of the reference."""
        return [self.session.read(meta) for meta in outcome.tensors]
