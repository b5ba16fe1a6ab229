"""The search as a state machine: `ask` says what to sample next, `wrote` and `judged` tell it what came of it. Pure.

::

    ask(now) ─▶ Ask ─▶ … ─▶ wrote ─ new source? ─▶ to be verified ─▶ judged
       └ None: the budget is spent, or it was stopped    └ the same as before, or none: ends here

Invariants: nothing is asked for beyond the budget; every Ask ends in exactly one of judged, same as before, lost.

What to refine, or whether to begin anew: two arms, fresh and refine. Each has a Beta posterior over "its answer is a
new proven kernel"; Thompson sampling draws one from each and pulls the larger. So an engine that never learnt to repair
is soon asked for first answers only, and one that does is given its own attempts back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from kbrl_async.lab.optimize.tree import POLICY, Attempt, Judgement, Tree, progress
from protocols.records import Fault

FRESH, REFINE = "fresh", "refine"
FADE = 0.98
"""Forgetting per answer: what paid early, while everything was new, must not decide for ever."""


class Budget(msgspec.Struct, frozen=True):
    """What a search may spend; None: no limit of that kind."""

    seconds: float | None = None
    tokens: int | None = None
    """Of answers, as the engine counts them."""
    attempts: int | None = None

    def spent(self, seconds: float, tokens: int, attempts: int) -> str:
        """What has run out (`"time"`, `"tokens"`, `"attempts"`); empty while there is something left of each."""
        if self.seconds is not None and seconds >= self.seconds:
            return "time"
        if self.tokens is not None and tokens >= self.tokens:
            return "tokens"
        return "attempts" if self.attempts is not None and attempts >= self.attempts else ""

    def share(self, seconds: float, tokens: int, attempts: int) -> float:
        """How much of it is spent, 0 … 1, by whatever runs out first."""
        pairs = ((seconds, self.seconds), (tokens, self.tokens), (attempts, self.attempts))
        return min(1.0, max((used / limit for used, limit in pairs if limit), default=0.0))


class SearchOptions(msgspec.Struct, frozen=True):
    budget: Budget = Budget(seconds=60.0)
    max_turns: int = 4
    width: int = 8
    """Refinements of one attempt, at most."""
    value: Callable[[str], float] | None = None
    """Of a source, by a value model: settles which of equally good attempts is refined. It proves nothing."""
    repeats: int = 200
    """Answers in a row that bring no new source, after which the engine has nothing more to say."""


class AnswerRequest(msgspec.Struct, frozen=True):
    """A request for one answer."""

    number: int
    parent: int | None
    """The attempt to refine; None: a first answer."""


class Search:
    """See the module. `now` is in seconds, since whenever."""

    def __init__(self, options: SearchOptions, rng: random.Random, now: float) -> None:
        self.options, self._began = options, now
        self.tree = Tree()
        self.tokens = 0
        self.stopped = ""
        """Why nothing more is asked for: time, tokens, attempts, repeats, or what `stop` was told."""
        self._chooser = Chooser(rng, options.max_turns, options.width, options.value)
        self.start: int | None = None
        """The attempt that the search was given to begin with."""
        self._open: set[int] = set()
        self._repeats = 0

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return not self._open

    def seconds(self, now: float) -> float:
        return now - self._began

    def share(self, now: float) -> float:
        """How much of the budget is spent."""
        return self.options.budget.share(self.seconds(now), self.tokens, len(self.tree))

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason

    def ask(self, now: float) -> AnswerRequest | None:
        self.stop(self.options.budget.spent(self.seconds(now), self.tokens, len(self.tree)))
        if self._repeats >= self.options.repeats:
            self.stop("repeats")
        if self.stopped or self.start in self._open:
            return None
        made = self.tree.ask(self._parent(), self.seconds(now))
        self._open.add(made.number)
        return AnswerRequest(made.number, made.parent)

    def plant(self, source: str, origin: str, now: float) -> Attempt:
        """A candidate from elsewhere, such as a retrieved kernel: it costs an attempt and can be refined."""
        made = self.tree.ask(None, self.seconds(now), origin)
        self._open.add(made.number)
        return self._written(made.number, source, 0)

    def begin_with(self, source: str, origin: str, now: float) -> Attempt:
        """A kernel that somebody has: nothing is asked for before its verdict, and then first that it is refined."""
        made = self.plant(source, origin, now)
        self.start = made.number
        return made

    def wrote(self, number: int, source: str, tokens: int, problem: str = "") -> Attempt:
        """An answer has come; `problem` says why there is no source in it. Verify it if `needs_verdict`."""
        self.tokens += tokens
        attempt = self._written(number, source, tokens)
        if not source:
            self.judged(number, Judgement(Fault.FORMAT_ERROR, "format", problem))
        return self.tree[attempt.number]

    def needs_verdict(self, attempt: Attempt) -> bool:
        return bool(attempt.source) and attempt.same_as is None and attempt.judgement is None

    def judged(self, number: int, judgement: Judgement) -> None:
        self.tree.judge(number, judgement)
        attempt = self.tree[number]
        self._close(number, paid=judgement.is_proven and self._is_better_than_parent(attempt))

    def lost(self, number: int, reason: str) -> None:
        """No verdict will come: the host failed, or the search ended before."""
        self.tree.lose(number, reason)
        self._open.discard(number)

    @property
    def best(self) -> Attempt | None:
        return next(iter(self.tree.proven()), None)

    def _parent(self) -> int | None:
        start = self.start
        if start is not None and not self.tree.children(start) and self._chooser.may_refine(start, self.tree):
            return start
        return self._chooser.choose(self.tree)

    def _written(self, number: int, source: str, tokens: int) -> Attempt:
        attempt = self.tree.write(number, source, tokens)
        if attempt.same_as is not None:
            self._repeats += 1
            self._close(number, paid=False)
        elif source:
            self._repeats = 0
        return attempt

    def _close(self, number: int, *, paid: bool) -> None:
        self._open.discard(number)
        if self.tree[number].origin == POLICY:
            self._chooser.learn(self.tree[number], paid=paid)

    def _is_better_than_parent(self, attempt: Attempt) -> bool:
        parent = None if attempt.parent is None else self.tree[attempt.parent].judgement
        mine = attempt.judgement
        if parent is None or mine is None or not parent.is_proven:
            return True
        return (mine.lo or 0.0) > (parent.lo or 0.0)


class Chooser:
    """See the module. Of what may be refined, the best that was refined least is taken; `max_turns` 1 never refines."""

    def __init__(
        self,
        rng: random.Random,
        max_turns: int = 4,
        width: int = 8,
        value: Callable[[str], float] | None = None,
    ) -> None:
        self._rng, self._max_turns, self._width, self._value = rng, max_turns, width, value
        self.wins = {FRESH: 1.0, REFINE: 1.0}
        self.losses = {FRESH: 1.0, REFINE: 1.0}

    def choose(self, tree: Tree) -> int | None:
        """The attempt to refine; None: a first answer."""
        able = [attempt for attempt in tree if self.may_refine(attempt.number, tree)]
        best = max(able, key=lambda a: self.worth(a, tree), default=None)
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

    def may_refine(self, number: int, tree: Tree) -> bool:
        """Whether it has a verdict that is worth showing, and turns are left."""
        attempt = tree[number]
        judged = attempt.judgement
        if judged is None or attempt.same_as is not None or not attempt.source or attempt.turn + 1 >= self._max_turns:
            return False
        return len(tree.children(attempt.number)) < self._width and judged.category != "cheating"

    def worth(self, attempt: Attempt, tree: Tree) -> float:
        tie = self._rng.random() if self._value is None else math.tanh(self._value(attempt.source))
        return value(attempt.judgement) / (1.0 + 0.5 * len(tree.children(attempt.number))) + 1e-6 * tie


def value(judgement: Judgement | None) -> float:
    """Of refining it: how far it came, and for a proven one how fast it is."""
    if judgement is None or not judgement.is_proven:
        return progress(judgement)
    return 4.0 + max(-1.0, math.log2(max(judgement.lo or 0.5, 1e-3)))
