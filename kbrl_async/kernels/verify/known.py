"""What is known of an input set: its tensors, kept; or how they come about, for problems too large to keep them.

::

    first draw ─▶ Sizes ─▶ all sets at once? ─▶ `Held`
                       └─▶ one at a time?    ─▶ `AskedSet`: drawn, varied and answered again whenever it is looked at
                       └─▶ not even that: `ProblemError`, in bytes

Of `AskedSet` sets the last one that was looked at is in memory, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import torch

from kbrl_async.errors import ProblemError

_ALL_SHARE = 0.5
"""Of the memory that a bench may plan with, for all sets of one problem at once."""
_HELD_INPUTS, _HELD_OUTPUTS = 12, 11
"""How often a problem's inputs and outputs are in memory where its sets are kept, slots aside: one of each for every
set, and what one set needs while it is made."""
_ASKED_INPUTS, _ASKED_OUTPUTS = 3, 6
"""And where they are not: a set and both slots; what is expected, what came, both slots, the candidate's own two."""
_WIDE_INPUTS, _WIDE_OUTPUTS = 2, 5
"""What an fp64 run of the reference takes beside that."""
Blocks = list[torch.Tensor]


class Sizes(msgspec.Struct, frozen=True):
    """Bytes of one call, and of the weights."""

    inputs: int
    outputs: int = 0
    weights: int = 0

    def kept(self, draws: int, slots: int) -> int:
        """The peak where every set is kept."""
        inputs = (_HELD_INPUTS + draws + 2 * slots) * self.inputs
        return inputs + _HELD_OUTPUTS * self.outputs + 4 * self.weights

    @property
    def asked(self) -> int:
        """The peak where one set is in memory at a time, and the reference is never run in fp64."""
        return _ASKED_INPUTS * self.inputs + _ASKED_OUTPUTS * self.outputs + 4 * self.weights

    @property
    def widened(self) -> int:
        """The same, with fp64."""
        return self.asked + _WIDE_INPUTS * self.inputs + _WIDE_OUTPUTS * self.outputs

    def are_kept(self, memory: int, draws: int, slots: int) -> bool:
        """Whether `memory` bytes, of which others want some, are enough to keep all sets."""
        return self.kept(draws, slots) <= _ALL_SHARE * memory

    def refuse(self, problem_id: str, memory: int) -> None:
        """:raises ProblemError: one set at a time does not fit either."""
        if self.asked <= memory:
            return
        parts = f"inputs {_told(self.inputs)}, outputs {_told(self.outputs)}, weights {_told(self.weights)}"
        raise ProblemError(
            f"{problem_id} does not fit: verifying it takes about {_told(self.asked)} ({parts}), and this bench may "
            f"plan with {_told(memory)}",
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
    def __init__(self, blocks: Blocks, expected: Blocks) -> None:
        self.blocks, self.expected = blocks, expected

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
        if self._of is not one or self._values is None:
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

    def __init__(self, seeds: Sequence[int], draw: Callable[[int], Blocks]) -> None:
        self._seeds, self._draw = list(seeds), draw

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, place: int, /) -> Blocks:
        return self._draw(self._seeds[place])

    def __iter__(self) -> Iterator[Blocks]:
        return (self._draw(seed) for seed in self._seeds)

    def replace(self, place: int, seed: int) -> None:
        self._seeds[place] = seed


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def outlines(tensors: Sequence[torch.Tensor]) -> Blocks:
    """Shapes, strides and dtypes without memory."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]


def _told(size: int) -> str:
    return f"{size:,} bytes" if size < 1 << 30 else f"{size / 2**30:.1f} GiB ({size:,} bytes)"
