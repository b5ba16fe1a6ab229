"""An author who writes C like a beginner: mostly sensible, sometimes wrong, sometimes slow.

A kernel template asks the author at each place where a choice exists; the author answers by its habits. So the corpus
holds every mixture of right and wrong, slow and fast, and RL has something to find.
"""

from __future__ import annotations

import random

import msgspec


class Habits(msgspec.Struct, frozen=True):
    """Probabilities of a slip (wrong code) by kind, and of the fast one among equally correct styles.

    RL does not make frequent what is rare here, because a group seldom has both forms: of fast ones at .25 a policy
    that was paid for speed took up the first line only, which every kernel shares (docs/methods.md).
    """

    bound: float = 0.2
    formula: float = 0.2
    start: float = 0.18
    index: float = 0.16
    syntax: float = 0.22
    name: float = 0.12
    argument: float = 0.16
    fence: float = 0.05
    fast: float = 0.7


UNBUILT = ("syntax", "name")
"""Slips that a compiler finds."""
CAREFUL = Habits(bound=0, formula=0, start=0, index=0, syntax=0, name=0, argument=0, fence=0, fast=1.0)
"""Writes the correct, fast form only."""
SLOW = msgspec.structs.replace(CAREFUL, fast=0.0)
"""Writes the correct, slow form only."""


class Author:
    """Draws choices; remembers which slips it made, so that a corpus can tell what it holds.

    With `slips` the slips are drawn from a stream of their own: two authors with equal `rng` then write in the same
    style, whatever slips each makes, so that the second can repair what the first wrote.
    """

    def __init__(self, rng: random.Random, habits: Habits, slips: random.Random | None = None) -> None:
        self.rng = rng
        self._slip_rng = slips or rng
        self.habits = habits
        self.slips: list[str] = []
        self.unbuilt: list[str] = []
        """What was written where a slip keeps the kernel from being built."""

    def slip(self, kind: str, right: str, *wrong: str) -> str:
        """`right`, or with the habit's probability one of `wrong`."""
        if wrong and self._slip_rng.random() < getattr(self.habits, kind):
            self.slips.append(kind)
            written = self._slip_rng.choice(wrong)
            if kind in UNBUILT:
                self.unbuilt.append(written)
            return written
        return right

    def style(self, slow: str, fast: str) -> str:
        """Two correct forms of different speed."""
        return fast if self.is_fast() else slow

    def is_fast(self) -> bool:
        """Whether the author takes the fast one of two correct ways."""
        return self.rng.random() < self.habits.fast
