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
import re
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.kernels.verify import compare, inputs, values, wire
from kbrl_async.kernels.verify.fresh import Pool, like
from kbrl_async.kernels.verify.options import Tick, no_tick
from kbrl_async.kernels.verify.session import CandidateFault, Judged, Outcome, Session
from kbrl_async.kernels.verify.tolerance import FP8_SUM, HALF

_NARROW = re.compile(r"\b(float16|bfloat16|half|float8\w*)\b")
_FP8 = tuple(kind for name in dir(torch) if name.startswith("float8_") and (kind := getattr(torch, name)).itemsize == 1)
_GROWTH, _DEGREE = 64.0, 4
_LOOSE, _MORE = 0.1, 8.0


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
        self.replaced: dict[str, str] = {}
        """Sets that were left out for a milder one, and why."""
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

        :raises ProblemError: the reference can't be compared with, or its inputs are not what it declares.
        """
        for draw in draws:
            self._refuse_outside(draw)
        self._pool = pool
        kinds = inputs.kinds_for(draws[0])
        for number, kind in enumerate(inputs.few_of(kinds, self._rng) if self._is_light else kinds):
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

    def _refuse_outside(self, draw: list[torch.Tensor]) -> None:
        for number, (least, most) in self._domains.items():
            low, high = torch.aminmax(draw[number].double()) if draw[number].numel() else (least, most)
            if float(low) < least or float(high) > most:
                text = f"get_inputs of {self._problem_id} gives {float(low):.4g} … {float(high):.4g} as tensor {number}"
                raise ProblemError(f"{text}, and INPUT_DOMAINS promises {least} … {most}", "Mend one of the two")

    def _repeated(self) -> InputSet:
        return msgspec.structs.replace(self.sets[0], name="repeated")

    def _varied(self, kind: inputs.Kind, draw: list[torch.Tensor]) -> list[torch.Tensor]:
        """Varied as tensors of the problem's shapes, given back as flat blocks."""
        if kind.shape == "mixed":
            blocks = [torch.empty_like(block) for block in draw]
            self._pool.mix([blocks], self._rng)
            return blocks
        shaped = [like(block, example) for block, example in zip(draw, self._oracle.examples, strict=True)]
        made = inputs.vary(shaped, kind, self._rng, self._domains, self.fixed)
        return [values.flat(tensor) for tensor in made]

    def _try(self, kind: inputs.Kind, blocks: list[torch.Tensor]) -> InputSet | None:
        """None where the reference does not accept these inputs, or its answer can't tell right from wrong."""
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
            self._learn(outcome, expected, mutated)
        self.reference_s = max(self.reference_s, outcome.elapsed_ns / 1e9)
        tolerances = self._tolerances(kind, blocks, expected)
        if kind.name != "nominal" and any(tolerance.ill for tolerance in tolerances):
            self._leave(kind, "rounding errors decide there")
            return None
        if reason := self._strays(blocks, expected):
            self._leave(kind, reason)
            return None
        made = InputSet(kind.name, blocks, expected, tolerances, mutated, is_degenerate(blocks, expected, tolerances))
        if not self.sets:
            self._refuse_random(made)
        return made

    def _leave(self, kind: inputs.Kind, reason: str) -> None:
        self.replaced.setdefault(kind.name, reason)

    def _strays(self, blocks: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
        """Why these inputs are outside of what the problem is for; empty where they are not.

        The first nominal set is the measure, so it never strays: outputs grow at most as a polynomial of the inputs
        does, and where half precision is at work, moving the inputs by its rounding errors moves outputs hardly more
        than there. (A reference that casts inside is noise beyond that, and its fp64 run is the same noise.)
        """
        sizes = [compare.output_scale(block) for block in blocks]
        moves = self._moves(blocks, expected)
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

    def _moves(self, blocks: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
        """How far each output moves with inputs that move by rounding errors of half precision, of its own scale."""
        is_narrow = self._is_narrow or any(one.dtype in HALF for one in (*blocks, *expected))
        moved = self._answer(wire.OP_RUN, inputs.moved(blocks, self._rng, coarse=True)) if is_narrow else None
        if moved is None:
            return [0.0] * len(expected)
        pairs = zip(moved, expected, strict=True)
        return [_distance(*pair) / max(compare.output_scale(pair[1]), 1e-30) for pair in pairs]

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
        sums = self._sums(blocks)
        return [
            compare.tolerance(
                tensor,
                wide[i] if wide else None,
                self._nominal_scales[i],
                moved[i] if moved else None,
                binary=kind.shape == "binary",
                declared=self._declared.get(str(tensor.dtype).removeprefix("torch.")),
                sums=sums[i] if sums else 0.0,
            )
            for i, tensor in enumerate(expected)
        ]

    def _sums(self, blocks: list[torch.Tensor]) -> list[float]:
        """What fp8 products lose while they are added up, of the largest sum of magnitudes; empty without fp8."""
        if not any(block.dtype in _FP8 for block in blocks):
            return []
        sizes = [block.float().abs().to(block.dtype) if block.is_floating_point() else block for block in blocks]
        answer = self._answer(wire.OP_RUN, sizes)
        return [FP8_SUM * compare.output_scale(tensor) for tensor in answer or []]

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


def tensors_of(tree: wire.Tree, place: int) -> list[int]:
    """The numbers of the tensors in argument `place` of `get_inputs()`."""
    items = tree[1] if tree is not None and tree[0] in ("L", "U") else []

    def numbers(node: Any) -> list[int]:
        kind, body = node
        if kind == "T":
            return [body]
        inner = body.values() if kind == "D" else body if kind in ("L", "U") else ()
        return [number for item in inner for number in numbers(item)]

    return numbers(items[place]) if 0 <= place < len(items) else []


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if not b.is_floating_point() or b.numel() == 0 or a.shape != b.shape:
        return 0.0
    return float(torch.nan_to_num((a.double() - b.double()).abs_(), nan=0.0, posinf=0.0).max())


def _any_wide(blocks: list[torch.Tensor]) -> bool:
    return any(block.is_floating_point() and block.dtype.itemsize >= 4 for block in blocks)


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
