"""Which attempt to refine next, or whether to begin anew. Pure, with injected randomness.

Two arms, fresh and refine: each has a Beta posterior over "its answer is a new proven kernel"; Thompson sampling draws
one from each and pulls the larger. So an engine that never learnt to repair is soon asked for first answers only, and
one that does is given its own attempts back. Within refine the best attempt that has been refined least is taken.
"""

from __future__ import annotations

import math
import random

from kbrl_async.lab.optimize.tree import Attempt, Judgement, Tree, progress

FRESH, REFINE = "fresh", "refine"
FADE = 0.98
"""Forgetting per answer: what paid early, while everything was new, must not decide for ever."""


class Chooser:
    """`max_turns` 1 never refines."""

    def __init__(self, rng: random.Random, max_turns: int = 4, width: int = 8) -> None:
        self._rng, self._max_turns, self._width = rng, max_turns, width
        self.wins = {FRESH: 1.0, REFINE: 1.0}
        self.losses = {FRESH: 1.0, REFINE: 1.0}

    def choose(self, tree: Tree) -> int | None:
        """The attempt to refine; None: a first answer."""
        best = max((a for a in tree if self._may_refine(a, tree)), key=lambda a: self._worth(a, tree), default=None)
        if best is None:
            return None
        drawn = {arm: self._rng.betavariate(self.wins[arm], self.losses[arm]) for arm in (FRESH, REFINE)}
        return best.number if drawn[REFINE] > drawn[FRESH] else None

    def learn(self, attempt: Attempt, *, paid: bool) -> None:
        """What became of an answer. `paid`: it is proven, new, and better than what it was refined from."""
        arm = FRESH if attempt.parent is None else REFINE
        for table in (self.wins, self.losses):
            table[arm] = max(1.0, table[arm] * FADE)
        (self.wins if paid else self.losses)[arm] += 1.0

    def _may_refine(self, attempt: Attempt, tree: Tree) -> bool:
        judged = attempt.judgement
        if judged is None or attempt.same_as is not None or not attempt.source or attempt.turn + 1 >= self._max_turns:
            return False
        return len(tree.children(attempt.number)) < self._width and judged.category != "cheating"

    def _worth(self, attempt: Attempt, tree: Tree) -> float:
        return value(attempt.judgement) / (1.0 + 0.5 * len(tree.children(attempt.number))) + 1e-6 * self._rng.random()


def value(judgement: Judgement | None) -> float:
    """Of refining it: how far it came, and for a proven one how fast it is."""
    if judgement is None or not judgement.is_proven:
        return progress(judgement)
    return 4.0 + max(-1.0, math.log2(max(judgement.lo or 0.5, 1e-3)))
