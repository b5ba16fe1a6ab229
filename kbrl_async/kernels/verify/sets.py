"""From secret draws to input sets: what a reference answers to each, and how far a candidate may be from that.

::

    draw ─vary─▶ inputs ─┬─▶ reference ─▶ expected, mutated?, aliases?       (the same inputs twice: random?)
                         ├─▶ reference in fp64 ─────────┐
                         └─moved─▶ reference ───────────┴─▶ tolerance

A set that the reference does not take, answers with something that is not finite, or on which rounding errors decide,
is replaced by a milder one and at last by a nominal one: the number of sets never depends on the problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.verify import compare, inputs, values, wire
from kbrl_async.kernels.verify.fresh import Pool, like
from kbrl_async.kernels.verify.options import Tick, no_tick
from kbrl_async.kernels.verify.session import CandidateFault, Judged, Outcome, Session


class InputSet(msgspec.Struct, frozen=True):
    name: str
    blocks: list[torch.Tensor]
    """Inputs as flat memory blocks, the originals: children only get copies."""
    expected: list[torch.Tensor]
    tolerances: list[compare.Tolerance]
    mutated: bool
    """The reference itself changes its inputs."""
    degenerate: bool = False
    """Zeros, a constant or an unchanged input would be a right answer."""


def place(session: Judged, slot: int, input_set: InputSet) -> None:
    """Write its inputs where the child finds them."""
    for where, block in zip(session.slots[slot], input_set.blocks, strict=True):
        where.copy_(block)


class Oracle(Protocol):
    """A reference child, as far as sets need it."""

    session: Session
    examples: list[torch.Tensor]

    def ask(self, op: int, blocks: list[torch.Tensor]) -> tuple[Outcome, list[torch.Tensor]]:
        """One call on these inputs (slot 0): its outcome, and copies of its outputs."""


class SetMaker:
    """Makes the sets of one refresh; what it finds out about the reference stays here as attributes."""

    def __init__(self, oracle: Oracle, problem_id: str, rng: random.Random) -> None:
        self._oracle, self._problem_id, self._rng = oracle, problem_id, rng
        self.sets: list[InputSet] = []
        self.reference_s = 0.0
        self.out_tree: wire.Tree = None
        self.kinds: list[str] = []
        self.strides: list[tuple[int, ...]] = []
        self.aliases = False
        """An output of the reference shares memory with an input."""
        self._nominal_scales: list[float] = []

    def make(
        self,
        draws: list[list[torch.Tensor]],
        pool: Pool,
        redraw: Callable[[], list[torch.Tensor]],
        tick: Tick = no_tick,
    ) -> list[InputSet]:
        """`draws`: flat blocks of at least two secret draws, of which `pool` makes others; `redraw` makes one more.
        `tick` is called for each set.
        """
        self._pool = pool
        for number, kind in enumerate(inputs.kinds_for(draws[0])):
            tick()
            made = self._repeated() if kind.repeats else None
            for milder in () if made else inputs.attempts(kind):
                draw = draws[number % len(draws)] if milder is kind else redraw()
                made = self._try(milder, self._varied(milder, draw))
                if made is not None:
                    break
                if kind.shape == "mixed":
                    pool.be_plain()
            if made is None:
                raise ProblemError(f"the reference of {self._problem_id} gives no finite output")
            self.sets.append(made)
        return self.sets

    def _repeated(self) -> InputSet:
        return msgspec.structs.replace(self.sets[0], name="repeated")

    def _varied(self, kind: inputs.Kind, draw: list[torch.Tensor]) -> list[torch.Tensor]:
        """Varied as tensors of the problem's shapes, given back as flat blocks."""
        if kind.shape == "mixed":
            blocks = [torch.empty_like(block) for block in draw]
            self._pool.mix([blocks], self._rng)
            return blocks
        shaped = [like(block, example) for block, example in zip(draw, self._oracle.examples, strict=True)]
        return [values.flat(tensor) for tensor in inputs.vary(shaped, kind, self._rng)]

    def _try(self, kind: inputs.Kind, blocks: list[torch.Tensor]) -> InputSet | None:
        """None where the reference does not accept these inputs, or its answer can't tell right from wrong."""
        try:
            outcome, expected = self._oracle.ask(wire.OP_RUN, blocks)
        except CandidateFault:
            if kind.name == "nominal":
                raise
            return None
        if kind.name != "nominal" and not all(map(_is_finite, expected)):
            return None
        if kind.has_ties and not all(tensor.is_floating_point() for tensor in expected):
            return None
        slots = self._oracle.session.slots[0]
        mutated = not all(compare.same_values(a, b) for a, b in zip(slots, blocks, strict=True))
        if not self.sets:
            self._learn(outcome, expected, mutated)
        self.reference_s = max(self.reference_s, outcome.elapsed_ns / 1e9)
        tolerances = self._tolerances(kind, blocks, expected)
        if kind.name != "nominal" and any(tolerance.ill for tolerance in tolerances):
            return None
        made = InputSet(kind.name, blocks, expected, tolerances, mutated, is_degenerate(blocks, expected, tolerances))
        if not self.sets:
            self._refuse_random(made)
        return made

    def _learn(self, outcome: Outcome, expected: list[torch.Tensor], mutated: bool) -> None:
        self.reference_s = 0.0
        self.out_tree = outcome.tree
        self.kinds = [meta.kind for meta in outcome.tensors]
        self.strides = [meta.strides for meta in outcome.tensors]
        self._nominal_scales = [compare.output_scale(tensor) for tensor in expected]
        self.aliases = mutated or follows_inputs(self._oracle.session, 0, outcome, expected)

    def _tolerances(
        self, kind: inputs.Kind, blocks: list[torch.Tensor], expected: list[torch.Tensor]
    ) -> list[compare.Tolerance]:
        wide = self._answer(wire.OP_DOUBLE, blocks)
        moved = self._answer(wire.OP_RUN, inputs.moved(blocks, self._rng)) if _any_wide(blocks) else None
        return [
            compare.tolerance(
                tensor,
                wide[i] if wide else None,
                self._nominal_scales[i],
                moved[i] if moved else None,
                binary=kind.shape == "binary",
            )
            for i, tensor in enumerate(expected)
        ]

    def _answer(self, op: int, blocks: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """None where the reference has no fp64 version: then it has no honest error either."""
        try:
            outputs = self._oracle.ask(op, blocks)[1]
        except CandidateFault:
            return None
        return outputs if len(outputs) == len(self._nominal_scales) else None

    def _refuse_random(self, first: InputSet) -> None:
        """A reference that answers the same inputs twice in two ways can't be compared with anything."""
        again = self._oracle.ask(wire.OP_RUN, first.blocks)[1]
        found = [compare.difference(*three) for three in zip(again, first.expected, first.tolerances, strict=True)]
        if any(difference.wrong for difference in found):
            raise ProblemError(
                f"the reference of {self._problem_id} is random or keeps state: the same inputs gave two answers",
                "Take dropout and other randomness out of the problem, or exclude it",
            )


def follows_inputs(session: Judged, slot: int, outcome: Outcome, outputs: list[torch.Tensor]) -> bool:
    """Whether outputs of the last call change when its inputs are overwritten afterwards: they share memory.

    Asks nobody: the inputs lie in memory that the trusted side holds too, and it reads the outputs itself.
    """
    places = session.slots[slot]
    for place in places:
        place.view(torch.uint8).bitwise_not_()
    again = [session.read(meta) for meta in session.again(wire.OP_EMPTY, slot, outcome.tensors, 5.0)]
    for place in places:
        place.view(torch.uint8).bitwise_not_()
    return not all(compare.same_values(a, b) for a, b in zip(again, outputs, strict=True))


def is_degenerate(blocks: list[torch.Tensor], answers: list[torch.Tensor], tolerances: list[compare.Tolerance]) -> bool:
    """Zeros, a constant or an input returned as it came would be a right answer: nothing can be proven there."""
    for expected, tolerance in zip(answers, tolerances, strict=True):
        if expected.numel() == 0:
            continue
        constant = expected.flatten()[0].expand_as(expected)
        flats = [b for b in blocks if b.numel() == expected.numel() and b.dtype == expected.dtype]
        guesses = [torch.zeros_like(expected), constant, *(flat.view(expected.shape) for flat in flats)]
        if all(compare.difference(guess, expected, tolerance).wrong for guess in guesses):
            return False
    return True


def _any_wide(blocks: list[torch.Tensor]) -> bool:
    return any(block.is_floating_point() and block.dtype.itemsize >= 4 for block in blocks)


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
