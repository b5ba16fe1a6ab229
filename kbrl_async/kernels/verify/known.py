"""What is known of an input set: its tensors, kept; or how they come about, for problems too large to keep them.

::

    first draw ─▶ Sizes ─▶ all sets at once? ─▶ `Held`
                       └─▶ one at a time?    ─▶ `AskedSet`: drawn, varied and answered again whenever it is looked at
                       └─▶ not even that: `ProblemError`, in bytes

Of `AskedSet` sets the last one that was looked at is in memory, and no other.

On a GPU these are in memory then, I the inputs of one call and O its outputs (A: the reference's arena, I + O; what
forward needs inside comes on top, once it has run; of a candidate, what is beyond the list is not planned with):

| moment | the bench's | the reference's | a candidate's |
|---|---|---|---|
| a draw | (another draw: I) | A, and what `get_inputs` makes beside its places | |
| varied, in place | | A | |
| answered | set I, expected O | A, its own O | |
| moved by rounding errors, in A's places; answered again | set I, expected O | A, its own O | |
| mixed: the first draw waits on the host | | A, and as for a draw | the same and below |
| looked at again: drawn and varied in A, expected there | | A, as for a draw; its own O | arena I + O, outputs 3 O |
| compared, by parts; the output before waits on the host | got O | A | arena I + O, outputs 3 O |
| asked without its kernels, after calls over other inputs | | A, as for a draw | arena I + O, outputs 3 O |

Who is watched on a GPU frees its outputs before a set is looked at again, but for one secret set, before which one
earlier output is looked at: it holds one then, and two while it is called and compared.

Where the reference writes to its inputs, and on a CPU, the bench has I of its own in the last two as well. An fp64 run
takes inputs and outputs in fp64, and A room for these outputs; a second one, where a tolerance is eased, its outputs
too.

Weights W are there four times: the reference's, the bench's, and for each candidate a copy of these and its own.

What does not fit so lies on the host, in memory that the GPU reads and writes by its bus: the bench's weights and the
copy of them (`Offloaded.weights`); A (`Offloaded.inputs`), and then, as long as calls of one side are timed, the arena
of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import torch

from kbrl_async.errors import ProblemError

_ALL_SHARE = 0.5
"""Of the memory that a bench may plan with, for all sets of one problem at once."""
_HELD_INPUTS, _HELD_OUTPUTS = 12, 11
"""How often a problem's inputs and outputs are in memory where its sets are kept, slots aside: one of each for every
set, and what one set needs while it is made."""
_MADE = (
    (2, 1, 1, 0),  # a draw: the bench's other one, the reference's arena; in its process, the draw itself
    (2, 3, 0, 0),  # a set's tolerances: the bench's set and expected outputs; arena; the reference's own outputs
)
_BESIDE = (
    (2, 5, 1, 1),  # a set is drawn beside a candidate: both arenas; three outputs that the candidate holds
    # not where the candidate frees its outputs, and holds one or two:
    (2, 6, 0, 1),  # it is answered: the same, and the reference's own outputs; or compared: a copy of what came
)
"""Where sets are not kept: at which moments how often inputs, outputs, a draw outside of any arena, and a copy of the
inputs, where the bench needs one beside a candidate, are in memory. All else goes by parts (`pieces`)."""
_WEIGHTS, _WEIGHTS_APART, _WEIGHTS_WIDE = 4, 2, 3
"""How often weights are on the GPU: all of them; without those of the bench; and then with the reference's in fp64."""
Blocks = list[torch.Tensor]


class Offloaded(NamedTuple):
    """What lies on the host though it is a GPU's: the reference's arena, and what the bench has of weights."""

    inputs: bool = False
    weights: bool = False


_WAYS = (
    Offloaded(),
    Offloaded(weights=True),
    Offloaded(inputs=True),
    Offloaded(inputs=True, weights=True),
)
"""The cheapest first: weights are copied once a candidate, an arena for each timed call."""


class Sizes(msgspec.Struct, frozen=True):
    """Bytes of one call, and of the weights. `drawn`: what a draw takes outside of the arena that it goes to; `owned`:
    inputs of which the bench has a copy while a candidate runs, because those in the reference's arena do not stay.
    `apart`: draws that are kept though sets are not. `wide`: how much larger fp64 is. `frees`: whether a
    candidate gives its outputs back before a set is looked at again. `offloaded`: what does not count.
    """

    inputs: int
    outputs: int = 0
    weights: int = 0
    drawn: int = 0
    owned: int = 0
    apart: int = 0
    wide: int = 2
    frees: bool = False
    offloaded: Offloaded = Offloaded()

    def kept(self, draws: int, slots: int) -> int:
        """The peak where every set is kept."""
        inputs = (_HELD_INPUTS + draws + 2 * slots) * self.inputs
        return inputs + _HELD_OUTPUTS * self.outputs + 4 * self.weights

    @property
    def asked(self) -> int:
        """The peak where one set is in memory at a time, and the reference is never run in fp64."""
        return max(self.made, self._at(_BESIDE[:1] if self.frees else _BESIDE))

    @property
    def made(self) -> int:
        """The peak until a candidate comes."""
        return self._at(_MADE)

    def _at(self, moments: tuple[tuple[int, int, int, int], ...]) -> int:
        known = self.inputs, self.outputs, self.drawn, self.owned
        most = max(sum(count * size for count, size in zip(counts, known, strict=True)) for counts in moments)
        times = _WEIGHTS_APART if self.offloaded.weights else _WEIGHTS
        return most + self.apart + times * self.weights - self._arena(1)

    def _arena(self, wide: int) -> int:
        """Bytes of the reference's, where they do not count; its outputs `wide` times as large."""
        return self.inputs + wide * self.outputs if self.offloaded.inputs else 0

    @property
    def widened(self) -> int:
        """The same, with fp64: inputs and outputs in the reference's process, and an arena with room for these."""
        made = (2 + self.wide) * self.inputs + (1 + 3 * self.wide) * self.outputs - self._arena(self.wide)
        made += self.apart + (_WEIGHTS_WIDE if self.offloaded.weights else _WEIGHTS) * self.weights
        return max(made, self.asked + (0 if self.offloaded.inputs else self.wide - 1) * self.outputs)

    @property
    def on_host(self) -> int:
        """Bytes of the host, at most: both arenas have their place there."""
        return 2 * (self.inputs + self.outputs) * self.offloaded.inputs + 2 * self.weights * self.offloaded.weights

    def placed(self, memory: int, inside: int, host: int, is_replayable: bool = False) -> Sizes:
        """With as little on the host, of which `host` bytes may be taken, as `memory` bytes ask for; it is the last
        resort to forget what forward needs `inside`. `is_replayable`: which it is as long as its inputs are on the GPU;
        they do not leave it for what is needed inside.
        """
        ways = [msgspec.structs.replace(self, offloaded=way) for way in _WAYS]
        possible = [sizes for sizes in ways if sizes.on_host <= host]
        for needed in (inside, 0):
            for one in possible:
                if one.asked + needed <= memory and not (needed and is_replayable and one.offloaded.inputs):
                    return one
        return min(possible, key=lambda one: one.asked)

    def are_kept(self, memory: int, draws: int, slots: int) -> bool:
        """Whether `memory` bytes, of which others want some, are enough to keep all sets."""
        return self.kept(draws, slots) <= _ALL_SHARE * memory

    def peak(self, keeps_sets: bool, widens: bool, draws: int, slots: int) -> int:
        """Where sets are kept or not, and the reference is run in fp64 or not."""
        if keeps_sets:
            return self.kept(draws, slots)
        return self.widened if widens else self.asked

    def refuse(self, problem_id: str, memory: int) -> None:
        """:raises ProblemError: one set at a time does not fit either."""
        if self.asked <= memory:
            return
        parts = f"inputs {_in_gib(self.inputs)}, outputs {_in_gib(self.outputs)}, weights {_in_gib(self.weights)}"
        raise ProblemError(
            f"{problem_id} does not fit: verifying it takes about {_in_gib(self.asked)} ({parts}), and this bench may "
            f"plan with {_in_gib(memory)}",
            "Make the problem smaller, or raise timing_bench.memory_share",
        )


class Known(Protocol):
    """Inputs as flat memory blocks, the originals: children only get copies; and what is expected of them."""

    @property
    def blocks(self) -> Blocks: ...
    @property
    def expected(self) -> Blocks: ...
    @property
    def held(self) -> Blocks:
        """What of it is in memory for good."""
        ...

    def load(self) -> None:
        """What is looked at next is there already."""


class Held:
    def __init__(self, blocks: Blocks, expected: Blocks, is_there: Callable[[], bool] = lambda: True) -> None:
        """`is_there`: whether they still are what they were, where they lie in memory that is used for others next."""
        self.blocks, self.expected, self.is_there = blocks, expected, is_there

    def load(self) -> None:
        """It always is."""

    @property
    def held(self) -> Blocks:
        return [*self.blocks, *self.expected]


class Recent:
    """The one set that is in memory."""

    def __init__(self) -> None:
        self._of: AskedSet | None = None
        self._values: Held | None = None

    def get(self, one: AskedSet, make: Callable[[], Held]) -> Held:
        if self._of is not one or self._values is None or not self._values.is_there():
            self.forget()
            self._values, self._of = make(), one
        return self._values

    def forget(self) -> None:
        self._of = self._values = None


class AskedSet:
    """`make` draws, varies and asks the reference, the same each time."""

    held: Blocks = []  # noqa: RUF012 - nothing, ever

    def __init__(self, recent: Recent, make: Callable[[], Held]) -> None:
        self._recent, self._make = recent, make

    def load(self) -> None:
        self._recent.get(self, self._make)

    @property
    def blocks(self) -> Blocks:
        return self._recent.get(self, self._make).blocks

    @property
    def expected(self) -> Blocks:
        return self._recent.get(self, self._make).expected


class Draws(Protocol):
    """Some draws of a problem's inputs, as flat blocks: a list, or `Redrawn`."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Blocks: ...
    def __iter__(self) -> Iterator[Blocks]: ...


class Redrawn:
    """Draws that are made again from their seeds, each time they are looked at."""

    def __init__(
        self, seeds: Sequence[int], draw: Callable[[int], Blocks], lend: Callable[[int], Blocks] | None = None
    ) -> None:
        """`draw` gives memory of its own, `lend` memory that may be another's after the next draw or answer."""
        self._seeds, self._draw, self._lend = list(seeds), draw, lend or draw

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, place: int, /) -> Blocks:
        return self._draw(self._seeds[place])

    def __iter__(self) -> Iterator[Blocks]:
        return (self._draw(seed) for seed in self._seeds)

    def lent(self, place: int) -> Blocks:
        """To be read before anything else is drawn or asked."""
        return self._lend(self._seeds[place])

    def replace(self, place: int, seed: int) -> None:
        self._seeds[place] = seed


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def outlines(tensors: Sequence[torch.Tensor]) -> Blocks:
    """Shapes, strides and dtypes without memory."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]


def _in_gib(size: int) -> str:
    return f"{size:,} bytes" if size < 1 << 30 else f"{size / 2**30:.1f} GiB ({size:,} bytes)"
