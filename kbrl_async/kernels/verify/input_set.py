"""What a candidate is asked: one set of secret inputs, what the reference answers, and how far off is right."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from kbrl_async.kernels.verify import compare, wire
from kbrl_async.kernels.verify.known import Known
from kbrl_async.kernels.verify.pieces import pieces
from kbrl_async.kernels.verify.session import ForwardOutcome, Judged

_FEW = 1 << 16


class InputSet(msgspec.Struct, frozen=True):
    name: str
    known: Known
    tolerances: list[compare.Tolerance]
    mutated: bool
    """The reference itself changes its inputs."""
    seen: list[bool] = msgspec.field(default_factory=list)
    """Whether it is degenerate, once somebody has asked."""

    @property
    def degenerate(self) -> bool:
        """Zeros, a constant or an unchanged input would be a right answer. Looked at when it is asked: of most sets
        nobody does, and a GPU that others use is waited for several times.
        """
        if not self.seen:
            self.seen.append(is_degenerate(self.blocks, self.expected, self.tolerances))
        return self.seen[0]

    @property
    def blocks(self) -> list[torch.Tensor]:
        """Inputs as flat memory blocks, the originals: children only get copies."""
        return self.known.blocks

    @property
    def expected(self) -> list[torch.Tensor]:
        return self.known.expected


def place(session: Judged, slot: int, input_set: InputSet) -> None:
    """Write its inputs where the child finds them."""
    for where, block in zip(session.slots[slot], input_set.blocks, strict=True):
        where.copy_(block)


def follows_inputs(session: Judged, slot: int, outcome: ForwardOutcome, outputs: list[torch.Tensor]) -> bool:
    """Whether outputs of the last call change when its inputs are overwritten afterwards: they share memory.

    Asks nobody: the inputs lie in memory that the trusted side holds too, and it reads the outputs itself.
    """
    places = session.slots[slot]
    before = [tensor.clone() for tensor in outputs] if session.reads_in_place else outputs
    for place in places:
        place.view(torch.uint8).bitwise_not_()
    again = session.again(wire.OP_EMPTY, slot, outcome.tensors, 5.0)
    is_same = all(compare.same_values(session.look(meta), one) for meta, one in zip(again, before, strict=True))
    for place in places:
        place.view(torch.uint8).bitwise_not_()
    return not is_same


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


def is_degenerate(blocks: list[torch.Tensor], answers: list[torch.Tensor], tolerances: list[compare.Tolerance]) -> bool:
    """Zeros, a constant or an input returned as it came would be a right answer, or just what a cast of an input is:
    nothing can be proven there, because a candidate may bring inputs and outputs to another type by the library.
    """
    for expected, tolerance in zip(answers, tolerances, strict=True):
        if expected.numel() == 0:
            continue
        whole = expected.flatten()
        alike = [b.flatten() for b in blocks if b.numel() == expected.numel() and b.is_complex() == whole.is_complex()]
        few = slice(_FEW)  # what is wrong there is wrong
        if _are_wrong(whole[few], [flat[few] for flat in alike], tolerance) or _are_wrong(whole, alike, tolerance):
            return False
    return True


def _are_wrong(expected: torch.Tensor, inputs: list[torch.Tensor], tolerance: compare.Tolerance) -> bool:
    """Whether zeros, its first value everywhere, and each of these are all no right answer.

    The first value of a single one is that one: it says nothing of a loss.
    """
    values = [0.0, expected[0].item()] if expected.numel() > 1 else [0.0]
    return all(_is_value_wrong(value, expected, tolerance) for value in values) and all(
        compare.difference(guess, expected, tolerance).wrong
        if guess.dtype is expected.dtype
        else _is_no_cast(guess, expected)
        for guess in inputs
    )


def _is_no_cast(guess: torch.Tensor, expected: torch.Tensor) -> bool:
    """By bits: within a tolerance of half precision real work, too, looks like one. What can't be cast is none."""
    try:
        return not compare.same_values(guess.to(expected.dtype), expected)
    except NotImplementedError:
        return True


def _is_value_wrong(value: float, expected: torch.Tensor, tolerance: compare.Tolerance) -> bool:
    """Everywhere."""
    return any(compare.difference(torch.full_like(part, value), part, tolerance).wrong for (part,) in pieces(expected))
