"""From secret draws to input sets: what a reference answers to each, and how far a candidate may be from that.

::

    draw ─vary─▶ inputs ─┬─▶ reference ─▶ expected, mutated?, aliases?       (the same inputs twice: random?)
                         ├─▶ reference in fp64 ─────────┐
                         └─moved─▶ reference ───────────┴─▶ tolerance

Sets of problems too large for that are not kept: they are made again whenever they are looked at (`known`).

A set that the reference does not take, answers with something that is not finite, or on which rounding errors decide,
is replaced by a milder one and at last by a nominal one: the number of sets never depends on the problem.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.kernels.verify import compare, inputs, leave, lowering, values, wire
from kbrl_async.kernels.verify.fresh import Pool, like
from kbrl_async.kernels.verify.input_set import InputSet, follows_inputs, is_degenerate, tensors_of
from kbrl_async.kernels.verify.known import AskedSet, Draws, Held, Recent, Redrawn, outlines
from kbrl_async.kernels.verify.options import Tick, no_tick
from kbrl_async.kernels.verify.pieces import as_real, bounds, countable, pieces
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome, Session
from kbrl_async.kernels.verify.tolerance import (
    FP8_MOST,
    FP8_SUM,
    HALF,
    HONEST_FACTOR,
    eased,
    is_usual,
    relative_of,
)

_NARROW = re.compile(r"\b(float16|bfloat16|half|float8\w*)\b")
_FP8 = tuple(kind for name in dir(torch) if name.startswith("float8_") and (kind := getattr(torch, name)).itemsize == 1)
_GROWTH, _DEGREE = 64.0, 4
_LOOSE, _MORE = 0.1, 8.0


Change = Callable[[list[torch.Tensor]], None]
"""What is done to inputs where they lie."""


class Inconstant(ProblemError):  # noqa: N818 - it may be constant with more memory
    """A reference answers the same inputs twice in two ways."""

    is_short = False
    """Whether its library found too little memory."""


class Oracle(Protocol):
    """A reference child, as far as sets need it."""

    session: Session
    examples: list[torch.Tensor]

    def ask(
        self, op: int, blocks: list[torch.Tensor], change: Change | None = None
    ) -> tuple[ForwardOutcome, list[torch.Tensor]]:
        """One call on these inputs (slot 0), changed there: its outcome, and copies of its outputs."""

    def own(self, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same values where nothing that is drawn or asked next overwrites them."""

    def held(self, blocks: list[torch.Tensor]) -> Held:
        """These inputs with what the reference answers, as long as nothing else is drawn or asked."""

    def recall(self) -> None:
        """The outputs of the last call of `ask` are in the child again, where they were given back."""


class SetMaker:
    """Makes the sets of one refresh; what it finds out about the reference stays here as attributes."""

    def __init__(
        self,
        oracle: Oracle,
        problem_id: str,
        rng: random.Random,
        source: str = "",
        inputs_tree: wire.Tree = None,
        *,
        is_light: bool = False,
    ) -> None:
        """`source`, the problem's: what it declares, and whether it computes in half precision inside. `is_light`: a
        secret few of the sets.
        """
        self._oracle, self._problem_id, self._rng, self._is_light = oracle, problem_id, rng, is_light
        self.declared = found = declared(source, problem_id)
        self._domains = {i: found.domains[place] for place in found.domains for i in tensors_of(inputs_tree, place)}
        self.fixed = frozenset(i for place in found.fixed for i in tensors_of(inputs_tree, place))
        self._declared = found.tolerances
        self._is_narrow = bool(_NARROW.search(source))
        self._nominal_inputs: list[float] = []
        self._nominal_moves: list[float] = []
        self._usual: list[float] = []
        """As `eased` takes them."""
        self.replaced: dict[str, str] = {}
        """Sets that were left out for a milder one, and why."""
        self.sets: list[InputSet] = []
        self.reference_s = 0.0
        self.wanted: list[torch.Tensor] = []
        """Shapes, strides and dtypes of the outputs."""
        self.out_tree: wire.Tree = None
        self.kinds: list[str] = []
        self.strides: list[tuple[int, ...]] = []
        self.aliases = False
        """An output of the reference shares memory with an input."""
        self._nominal_scales: list[float] = []

    def make(
        self,
        draws: Draws,
        pool: Pool,
        redraw: Callable[[int], list[torch.Tensor]],
        tick: Tick = no_tick,
        plan: Callable[[list[torch.Tensor], bool], tuple[bool, bool]] = lambda outputs, mutated: (True, True),
    ) -> list[InputSet]:
        """`draws`: flat blocks of at least two secret draws, of which `pool` makes others; `redraw` makes one more, of
        a seed, which may be lent (see `Redrawn`). `tick` is called for each set. `plan` is asked once the outputs are
        known, and whether inputs change: are tensors of sets kept, and is there room for an fp64 run?

        :raises ProblemError: the reference can't be compared with, or its inputs are not what it declares.
        """
        for drawn in range(len(draws)) if self._domains else ():
            self._refuse_outside(_lent(draws, drawn))
        self._pool, self._plan, self._recent = pool, plan, Recent()
        self._keeps = self._widens = True
        kinds = inputs.kinds_for(self._oracle.examples)
        for number, kind in enumerate(inputs.few_of(kinds, self._rng) if self._is_light else kinds):
            tick()
            made = self._repeated() if kind.repeats else None
            for milder in () if made else inputs.attempts(kind):
                self._recent.forget()
                seed, secret = self._rng.getrandbits(31), self._rng.getrandbits(63)
                place = number % len(draws) if milder is kind else None

                def blocks(
                    kind: inputs.Kind = milder, place: int | None = place, seed: int = seed, secret: int = secret
                ) -> list[torch.Tensor]:
                    def draw() -> list[torch.Tensor]:
                        return redraw(seed) if place is None else _lent(draws, place)

                    return self._varied(kind, draw, secret, place is None or isinstance(draws, Redrawn))

                made = self._try(milder, blocks)
                if made is not None:
                    break
                if kind.shape == "mixed":
                    pool.be_plain()
            assert made is not None, "the problem's own inputs are used whatever comes of them"
            self.sets.append(made)
        if not self.declared.precision:
            self._give_room()
        if self._keeps:  # what others leave behind may show in the first one's answer only now
            self.refuse_random(self.sets[0].blocks, self.sets[0].expected, self.sets[0].tolerances)
        return self.sets

    def _give_room(self) -> None:
        places = [place for place, one in enumerate(self.sets) if one.name in ("nominal", "repeated")]
        found = leave.together([self.sets[place].tolerances for place in places])
        for place, tolerances in zip(places, found, strict=True):
            self.sets[place] = msgspec.structs.replace(self.sets[place], tolerances=tolerances)

    def _refuse_outside(self, draw: list[torch.Tensor]) -> None:
        for number, (least, most) in self._domains.items():
            low, high = bounds(draw[number]) if draw[number].numel() else (least, most)
            if low < least or high > most:
                text = f"get_inputs of {self._problem_id} gives {low:.4g} … {high:.4g} as tensor {number}"
                raise ProblemError(f"{text}, and INPUT_DOMAINS promises {least} … {most}", "Mend one of the two")

    def _repeated(self) -> InputSet:
        return msgspec.structs.replace(self.sets[0], name="repeated")

    def _varied(
        self, kind: inputs.Kind, draw: Callable[[], list[torch.Tensor]], secret: int, is_ours: bool
    ) -> list[torch.Tensor]:
        """Varied as tensors of the problem's shapes, given back as flat blocks; the same for the same secret.
        `is_ours`: nobody else looks at the draw.
        """
        rng = random.Random(secret)
        if kind.shape == "mixed":
            return self._pool.mixed(rng)
        shaped = [like(block, example) for block, example in zip(draw(), self._oracle.examples, strict=True)]
        made = inputs.vary(shaped, kind, rng, self._domains, self.fixed, is_ours=is_ours)
        return [values.flat(tensor) for tensor in made]

    def _try(self, kind: inputs.Kind, make: Callable[[], list[torch.Tensor]]) -> InputSet | None:
        """None where the reference does not accept these inputs, or its answer can't tell right from wrong."""
        blocks = self._oracle.own(make())
        try:
            outcome, expected = self._oracle.ask(wire.OP_RUN, blocks)
        except CandidateFault:
            if kind.name == "nominal":
                raise
            self._leave(kind, "the reference fails")
            return None
        if kind.name != "nominal" and not all(map(_is_finite, expected)):
            self._leave(kind, "its answer is not finite")
            return None
        if kind.has_ties and not all(tensor.is_floating_point() for tensor in expected):
            return None
        slots = self._oracle.session.slots[0]
        mutated = self.declared.inputs_may_change or not all(
            compare.same_values(a, b) for a, b in zip(slots, blocks, strict=True)
        )
        if not self.sets:
            if expected and all(map(_has_nothing_finite, expected)):
                cure = (
                    "Mend its inputs or the problem: whatever is NaN or infinite where the reference is would be right"
                )
                raise ProblemError(f"the reference of {self._problem_id} gives no finite output", cure)
            self._learn(outcome, expected, mutated)
        self.reference_s = max(self.reference_s, outcome.elapsed_ns / 1e9)
        moves, beyond = self._moves(blocks, expected)
        tolerances, forgiving = self._tolerances(kind, blocks, expected, beyond)
        if kind.name != "nominal" and any(tolerance.ill for tolerance in (*tolerances, *forgiving)):
            self._leave(kind, "rounding errors decide there")
            return None
        reason = self.strays(blocks, expected, moves)
        if reason and kind.name != "nominal":  # what the problem itself draws is what it is for
            self._leave(kind, reason)
            return None
        if not self.sets:
            self.refuse_random(blocks, expected, tolerances)
        if self._keeps:
            return InputSet(kind.name, Held(blocks, expected), forgiving, mutated)
        known = AskedSet(self._recent, lambda: self._again(make, mutated))
        seen = [is_degenerate(blocks, expected, forgiving)]  # later it would have to be made again
        return InputSet(kind.name, known, forgiving, mutated, seen)

    def _again(self, make: Callable[[], list[torch.Tensor]], mutated: bool) -> Held:
        return self._oracle.held(self._oracle.own(make()) if mutated else make())

    def _leave(self, kind: inputs.Kind, reason: str) -> None:
        self.replaced.setdefault(kind.name, reason)

    def strays(self, blocks: list[torch.Tensor], expected: list[torch.Tensor], moves: list[float]) -> str:
        """Why these inputs are outside of what the problem is for; empty where they are not.

        The first nominal set is the measure, so it never strays: outputs grow at most as a polynomial of the inputs
        does, and where half precision is at work, moving the inputs by its rounding errors moves outputs hardly more
        than there. (A reference that casts inside is noise beyond that, and its fp64 run is the same noise.)
        """
        sizes = [compare.output_scale(block) for block in blocks]
        if not self.sets:
            self._nominal_inputs, self._nominal_moves = sizes, moves
            return ""
        ratios = [now / then for now, then in zip(sizes, self._nominal_inputs, strict=True) if then > 0]
        most = _GROWTH * max([1.0, *ratios]) ** _DEGREE
        scales = map(compare.output_scale, expected)
        if any(now > most * then > 0 for now, then in zip(scales, self._nominal_scales, strict=True)):
            return "its answer grows faster than its inputs by any power"
        if any(now > max(_LOOSE, _MORE * then) for now, then in zip(moves, self._nominal_moves, strict=True)):
            return "the reference does not agree with itself within rounding errors of half precision"
        return ""

    def _moves(self, blocks: list[torch.Tensor], expected: list[torch.Tensor]) -> tuple[list[float], list[float]]:
        """How far each output moves with inputs that move by rounding errors of half precision: of its own scale, and,
        of those in half precision, beyond what each element may be off by for its own size.
        """
        is_narrow = self._is_narrow or any(one.dtype in HALF for one in (*blocks, *expected))
        moved = self._answer(wire.OP_RUN, blocks, self._mover(coarse=True)) if is_narrow else None
        if moved is None:
            return [0.0] * len(expected), [0.0] * len(expected)
        pairs = list(zip(moved, expected, strict=True))
        shares = [_distance(*pair) / max(compare.output_scale(pair[1]), 1e-30) for pair in pairs]
        return shares, [
            _distance(*pair, share=relative_of(pair[1].dtype)) if pair[1].dtype in HALF else 0.0 for pair in pairs
        ]

    def _learn(self, outcome: ForwardOutcome, expected: list[torch.Tensor], mutated: bool) -> None:
        self.reference_s = 0.0
        self.out_tree, self.wanted = outcome.tree, outlines(expected)
        self._keeps, self._widens = self._plan(self.wanted, mutated)
        self.kinds = [meta.kind for meta in outcome.tensors]
        self.strides = [meta.strides for meta in outcome.tensors]
        self._nominal_scales = [compare.output_scale(tensor) for tensor in expected]
        if not mutated:
            self._oracle.recall()
        self.aliases = mutated or follows_inputs(self._oracle.session, 0, outcome, expected)

    def _tolerances(
        self, kind: inputs.Kind, blocks: list[torch.Tensor], expected: list[torch.Tensor], beyond: list[float]
    ) -> tuple[list[compare.Tolerance], list[compare.Tolerance]]:
        """What tells a reference from a random one, and what a candidate is held to: an output that is nothing but
        rounding errors proves nothing, but no honest kernel is wrong for making others. In half precision kernels round
        what lies in between, too (attention its scaled queries): half of what the inputs were moved by for `beyond`.
        """
        seen = self._simulated(blocks, expected)
        errors = self._errors(blocks, expected)  # one answer after the other: each is as large as what is expected
        wide = self._answer(wire.OP_DOUBLE, blocks) if self._widens else None
        found = [
            compare.tolerance(
                tensor,
                wide[i] if wide else None,
                self._nominal_scales[i],
                binary=kind.shape == "binary" and not self.declared.precision,
                declared=self._declared.get(str(tensor.dtype).removeprefix("torch.")),
                error=max(errors[i], beyond[i] / 2 / HONEST_FACTOR),
            )
            for i, tensor in enumerate(expected)
        ]
        if not self.sets:
            scales = [max(compare.output_scale(tensor), 1e-30) for tensor in expected]
            self._usual = [one.uncut / scale for one, scale in zip(found, scales, strict=True)]
        forgiving = found
        if wide is not None and kind.name != "nominal":
            forgiving = self._eased(found, blocks, expected, wide)
        elif wide is not None:
            is_simulated = bool(self.declared.precision)
            forgiving = [leave.as_drawn(*three, is_simulated) for three in zip(found, expected, wide, strict=True)]
        what = self.declared.precision, kind.shape == "binary"
        return found, [leave.allowed(*three, *what) for three in zip(forgiving, expected, seen, strict=True)]

    def _simulated(self, blocks: list[torch.Tensor], expected: list[torch.Tensor]) -> list[list[leave.Moved]]:
        """How far each output moves in each simulation of the precision that the problem declares; in several where
        outputs are few.
        """
        precision = self.declared.precision
        seen: list[list[leave.Moved]] = [[] for _ in expected]
        for grid in range(lowering.GRIDS if leave.is_few(expected) else 1) if precision else ():
            answer = self._answer(wire.OP_LOWERED + lowering.number(precision, grid), blocks)
            for one, tensor, other in zip(seen, expected, answer or expected, strict=True):
                one.append(leave.moved(tensor, other))
            del answer
        return seen

    def _eased(
        self,
        found: list[compare.Tolerance],
        blocks: list[torch.Tensor],
        expected: list[torch.Tensor],
        wide: list[torch.Tensor],
    ) -> list[compare.Tolerance]:
        """What is no nominal set's. One more run in fp64, where anything can come of it: it rounds nothing on the way,
        so it tells what the inputs' own rounding errors do."""
        if all(map(is_usual, found, expected, self._usual)):
            return found
        moved = self._answer(wire.OP_DOUBLE, blocks, self._mover())
        if moved is None:
            return found
        far = map(compare.largest_error, wide, moved)
        return list(map(eased, found, expected, self._usual, far))

    def _errors(self, blocks: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
        """How far each output moves with inputs that move by a rounding error, and what fp8 sums lose."""
        moved = self._answer(wire.OP_RUN, blocks, self._mover()) if _any_wide(blocks) else None
        far = [compare.largest_error(*both) for both in zip(expected, moved, strict=True)] if moved else None
        del moved
        both = zip(far or [0.0] * len(expected), self._sums(blocks, expected) or [0.0] * len(expected), strict=True)
        return list(map(max, both))

    def _sums(self, blocks: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
        """What fp8 products lose while they are added up, of the largest sum of magnitudes; empty without fp8."""
        if not any(block.dtype in _FP8 for block in blocks):
            return []
        answer = self._answer(wire.OP_RUN, blocks, _to_magnitudes)
        lost = [FP8_SUM * compare.output_scale(tensor) for tensor in answer or []]
        return [min(one, FP8_MOST * compare.output_scale(tensor)) for one, tensor in zip(lost, expected, strict=False)]

    def _mover(self, coarse: bool = False) -> Change:
        return lambda places: inputs.move(places, self._rng, coarse)

    def _answer(self, op: int, blocks: list[torch.Tensor], change: Change | None = None) -> list[torch.Tensor] | None:
        """None where the reference has no fp64 version: then it has no honest error either."""
        try:
            outputs = self._oracle.ask(op, blocks, change)[1]
        except CandidateFault:
            return None
        return outputs if len(outputs) == len(self._nominal_scales) else None

    def refuse_random(
        self, blocks: list[torch.Tensor], expected: list[torch.Tensor], tolerances: list[compare.Tolerance]
    ) -> None:
        """A reference that answers the same inputs twice in two ways can't be compared with anything."""
        again = self._oracle.ask(wire.OP_RUN, blocks)[1]
        found = [compare.difference(*three) for three in zip(again, expected, tolerances, strict=True)]
        if any(difference.wrong for difference in found):
            raise Inconstant(
                f"the reference of {self._problem_id} is random or keeps state: the same inputs gave two answers",
                "Take dropout and other randomness out of the problem, or exclude it",
            )


def _distance(a: torch.Tensor, b: torch.Tensor, share: float = 0.0) -> float:
    """The largest of two outputs, less this share of each element of the second."""
    a, b = as_real(a), as_real(b)
    if not b.is_floating_point() or b.numel() == 0 or a.shape != b.shape:
        return 0.0
    most = 0.0
    for one, other in pieces(a, b):
        apart = (one.double() - other.double()).abs_().sub_(other.double().abs(), alpha=share)
        most = max(most, float(torch.nan_to_num(apart, nan=0.0, posinf=0.0).max()))
    return most


def _any_wide(blocks: list[torch.Tensor]) -> bool:
    return any(block.is_floating_point() and block.dtype.itemsize >= 4 for block in blocks)


def _has_nothing_finite(tensor: torch.Tensor) -> bool:
    return (
        tensor.numel() > 0
        and tensor.is_floating_point()
        and not any(bool(torch.isfinite(countable(part)).any()) for (part,) in pieces(tensor))
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    tensor = as_real(tensor)
    return not tensor.is_floating_point() or all(
        bool(torch.isfinite(countable(part)).all()) for (part,) in pieces(tensor)
    )


def _to_magnitudes(places: list[torch.Tensor]) -> None:
    for place in places:
        for (part,) in pieces(place) if place.is_floating_point() else ():
            part.copy_(part.float().abs())


def _lent(draws: Draws, place: int) -> list[torch.Tensor]:
    return draws.lent(place) if isinstance(draws, Redrawn) else draws[place]
