"""Fresh secret values for each timed call, from a few secret draws, for one pass over memory.

::

    draws a, b ─▶ each element at its own secret place between a's and b's          (numbers)
                ─▶ each element a's or b's                                           (integers, masks, labels)
                ─▶ all of it turned round by a secret shift, and mixed              (where elements hang together)

A mixture of whole draws would not do: it lies in the span of few tensors, so that a linear answer can be put together
from answers known before, and integers would come again. What single elements may be stays so: ranges, signs, zeros
(triangular stays triangular). Where elements hang together in every draw (rows that sum to one, one-hot, permutations,
symmetric, sorted), only what keeps that is done.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import torch

from kbrl_async.kernels.verify.inputs import is_continuous, sums_to_one
from kbrl_async.kernels.verify.known import Draws, Redrawn
from kbrl_async.kernels.verify.pieces import are_equal, bounds, countable, first_rows, pieces, row_sums, slices

Structure = Literal["fixed", "whole", "turned", "each"]
"""All draws the same · one draw, or a mixture, as it is · the same with its dimensions turned · element by element."""
CHUNK = 1 << 22
_SLACK = 1 << 16
_SAMPLE = 64


def structure_of(tensors: Sequence[torch.Tensor]) -> Structure:
    """What all these draws of one input have in common."""
    first = tensors[0]
    if all(are_equal(first, other) for other in tensors[1:]):
        return "fixed"
    if first.dim() == 0 or first.is_complex() or (first.is_floating_point() and first.dtype.itemsize == 1):
        return "whole"
    if all(map(_is_sorted, tensors)):
        return "whole"
    if all(map(_is_symmetric, tensors)):
        return "turned"
    if all(map(sums_to_one, tensors)):
        return "turned"
    if not is_continuous(first) and (_have_one_sum(tensors) or all(map(_is_distinct, tensors))):
        return "turned"
    return "each"


def _is_sorted(tensor: torch.Tensor) -> bool:
    rows = countable(first_rows(tensor, _SAMPLE))
    if rows.shape[-1] <= 2 or rows.dtype is torch.bool:
        return False
    step = max(1, CHUNK // max(1, rows.shape[0]))
    begins = range(0, rows.shape[-1] - 1, step)
    pairs = ((rows[:, begin + 1 : begin + 1 + step], rows[:, begin : begin + step]) for begin in begins)
    return all(bool((later >= earlier[:, : later.shape[1]]).all()) for later, earlier in pairs)


def _is_symmetric(tensor: torch.Tensor) -> bool:
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    turned, size = tensor.transpose(-1, -2), tensor.shape[-1]
    step = max(1, CHUNK // (tensor.numel() // size))
    parts = (slice(begin, begin + step) for begin in range(0, size, step))
    return all(torch.equal(tensor[..., part, :], turned[..., part, :]) for part in parts)


def _have_one_sum(tensors: Sequence[torch.Tensor]) -> bool:
    """One-hot rows, permutations, a fixed number of ones a row."""
    sums = [row_sums(first_rows(tensor, _SAMPLE), torch.Tensor.double) for tensor in tensors]
    return tensors[0].shape[-1] > 1 and all(bool((each == sums[0][0]).all()) for each in sums)


def _is_distinct(tensor: torch.Tensor) -> bool:
    rows = first_rows(tensor, _SAMPLE)
    if rows.shape[-1] <= 3:
        return False
    if rows.numel() <= CHUNK:
        return _are_distinct(rows)
    return all(_are_distinct(row[:CHUNK]) and (row.numel() <= CHUNK or _are_many_distinct(row)) for row in rows)


def _are_distinct(rows: torch.Tensor) -> bool:
    found = rows.double().sort(-1).values
    return bool((found[..., 1:] != found[..., :-1]).all())


def _are_many_distinct(row: torch.Tensor) -> bool:
    """By ranges of values, as sorting all takes several times its memory."""
    least, most = bounds(row)
    if not math.isfinite(most - least):
        return _are_distinct(row)
    count = -(-row.numel() // CHUNK)
    edges = [least + (most - least) * number / count for number in range(count)] + [math.inf]
    return all(_are_distinct(_between(row, *both)) for both in itertools.pairwise(edges))


def _between(row: torch.Tensor, begin: float, end: float) -> torch.Tensor:
    wide = (part.double() for part in slices(row, CHUNK))
    return torch.cat([part[(part >= begin) & (part < end)] for part in wide])


class SecretWeights:
    """Secret numbers in (0, 1), of which each use takes a window at a secret place."""

    def __init__(self, most: int, device: torch.device, rng: random.Random) -> None:
        size = min(most, CHUNK) + _SLACK
        generator = torch.Generator(device).manual_seed(rng.getrandbits(63))
        self._numbers = {torch.float32: torch.rand(size, generator=generator, device=device)}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._numbers.values())

    def window(self, size: int, dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
        if dtype not in self._numbers:
            numbers = self._numbers[torch.float32]
            self._numbers[dtype] = numbers < 0.5 if dtype is torch.bool else numbers.to(dtype)
        begin = rng.randrange(_SLACK)
        return self._numbers[dtype][begin : begin + size]


def blend(
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    structure: Structure,
    is_number: bool,
    weights: SecretWeights,
    rng: random.Random,
) -> None:
    """Write values from the first two into the third, which may be one of them. All are of one shape and layout, dense
    in some order; the first may lie on the host. Where it is the third, and is turned, that takes a copy of it.
    """
    a, b, out = three
    if structure == "each":
        flat = [one.as_strided((one.numel(),), (1,)) for one in three]
        for begin in range(0, a.numel(), CHUNK):
            x, y, target = (one[begin : begin + CHUNK] for one in flat)
            x = x.to(out.device)
            window = weights.window(x.numel(), x.dtype if is_number else torch.bool, rng)
            torch.lerp(x, y, window, out=target) if is_number else torch.where(window, x, y, out=target)
        return
    if structure == "turned":
        # A square's two sides by the same shift: symmetric stays symmetric.
        shifts = [rng.randrange(size) for size in a.shape]
        if _is_square(a):
            shifts[-1] = shifts[-2]
        if a.data_ptr() == out.data_ptr():  # a part is read elsewhere than it is written
            a = a.clone()
        share = rng.uniform(0.2, 0.8) if is_number else 0.0
        for x, y, target in _turned(a, shifts, b, out):
            torch.lerp(x.to(out.device), y, share, out=target) if is_number else target.copy_(x)
        return
    if structure != "fixed" and is_number:
        share = rng.uniform(0.2, 0.8)
        for x, y, target in pieces(a, b, out):
            torch.lerp(x.to(out.device), y, share, out=target)
    else:
        out.copy_(a)


def _turned(
    a: torch.Tensor, shifts: Sequence[int], b: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Parts of all three, in which the first has its dimensions turned by `shifts`."""
    size = a.shape[0]
    inner = a.numel() // max(1, size)
    if a.dim() > 1 and inner > CHUNK:
        for number in range(size):
            yield from _turned(a[(number - shifts[0]) % size], shifts[1:], b[number], out[number])
        return
    step = max(1, CHUNK // max(1, inner))
    for begin in range(0, size, step):
        part = slice(begin, min(begin + step, size))
        places = torch.arange(part.start, part.stop, device=a.device).sub_(shifts[0]).remainder_(size)
        found = a.index_select(0, places)
        yield found.roll(tuple(shifts[1:]), tuple(range(1, a.dim()))) if a.dim() > 1 else found, b[part], out[part]


def _is_square(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]


def _copy(blocks: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> None:
    for block, place in zip(blocks, to, strict=True):
        if place.data_ptr() != block.data_ptr():
            place.copy_(block)


class Pool:
    """Secret draws that timed calls are made from. `draws[k][i]` is input *i* of draw *k*, as one flat block;
    `examples` have the inputs' shapes and strides.
    """

    def __init__(
        self,
        draws: Draws,
        examples: list[torch.Tensor],
        rng: random.Random,
        fixed: Collection[int] = (),
    ) -> None:
        """`fixed`: numbers of inputs that are only ever as they were drawn. Of `Redrawn` draws none is held."""
        assert len(draws) >= 2, "mixing needs two draws"
        self.draws, self._examples = draws, examples
        known = [draws[0], draws.lent(1)] if isinstance(draws, Redrawn) else draws
        inputs = list(zip(*map(self._shaped, known), strict=True))
        self._structures = ["fixed" if i in fixed else structure_of(same) for i, same in enumerate(inputs)]
        self._are_numbers = [all(map(is_continuous, same)) for same in inputs]
        device = inputs[0][0].device if inputs else torch.device("cpu")
        self._weights = SecretWeights(max((one.numel() for one in examples), default=0), device, rng)

    def _shaped(self, draw: list[torch.Tensor]) -> list[torch.Tensor]:
        return [like(block, one) for block, one in zip(draw, self._examples, strict=True)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it holds."""
        held = self.draws if isinstance(self.draws, list) else []
        return [*itertools.chain(*held), *self._weights.tensors]

    def mix(self, outs: list[list[torch.Tensor]], rng: random.Random) -> None:
        """Write one fresh set into each of `outs`, as flat blocks: the same values in all of them."""
        first, second = rng.sample(range(len(self.draws)), 2)
        if isinstance(self.draws, Redrawn):
            self._mix_lent(self.draws, outs, first, second, rng)
            return
        self._blend(self.draws[first], self.draws[second], outs[0], rng)
        for other in outs[1:]:
            _copy(outs[0], other)

    def _mix_lent(
        self, draws: Redrawn, outs: list[list[torch.Tensor]], first: int, second: int, rng: random.Random
    ) -> None:
        """The first draw waits where the mixture goes, unless the second will be lent just there: else on the host.
        That may be a candidate's slot, whose process stands still. What of its work on the device went on could read
        there is half of what it is given next, from draws whose sets it is given as they are: nothing that it lacks.
        """
        given = draws.lent(first)
        lent = {block.data_ptr() for block in given}
        waits = next((out for out in outs if not any(block.data_ptr() in lent for block in out)), None)
        if waits is None:
            given = [block.to("cpu", copy=True) for block in given]
        else:
            _copy(given, waits)
            given = waits
        mixed = draws.lent(second)
        self._blend(given, mixed, mixed, rng)  # and not into the first, which `blend` would have to copy
        for out in outs:
            _copy(mixed, out)

    def _blend(
        self, first: list[torch.Tensor], second: list[torch.Tensor], out: list[torch.Tensor], rng: random.Random
    ) -> None:
        shaped = zip(self._shaped(first), self._shaped(second), self._shaped(out), strict=True)
        for three, structure, is_number in zip(shaped, self._structures, self._are_numbers, strict=True):
            blend(three, structure, is_number, self._weights, rng)

    def mixed(self, rng: random.Random) -> list[torch.Tensor]:
        """One fresh set, in memory of its own, or lent where draws are. There, the first draw waits on the host."""
        if isinstance(self.draws, Redrawn):
            first, second = rng.sample(range(len(self.draws)), 2)
            given = [block.to("cpu", copy=True) for block in self.draws.lent(first)]
            blocks = self.draws.lent(second)
            self._blend(given, blocks, blocks, rng)
            return blocks
        device = self._weights.tensors[0].device
        blocks = [torch.empty(one.numel(), dtype=one.dtype, device=device) for one in self._examples]
        self.mix([blocks], rng)
        return blocks

    @property
    def needs_draws(self) -> bool:
        """Whether some input is fresh only where a draw is."""
        return "whole" in self._structures

    def replace(self, seed: int, draw: Callable[[int], list[torch.Tensor]], rng: random.Random) -> None:
        """A new draw instead of one of those there are."""
        place = rng.randrange(len(self.draws))
        if isinstance(self.draws, Redrawn):
            self.draws.replace(place, seed)
        elif isinstance(self.draws, list):
            self.draws[place] = draw(seed)

    def be_plain(self) -> None:
        """From now on inputs are drawn or mixed as a whole: for a reference that takes no single elements mixed."""
        self._structures = ["fixed" if one == "fixed" else "whole" for one in self._structures]


def like(block: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """A flat block as a tensor of the example's shape and strides."""
    return block.as_strided(example.shape, example.stride())
