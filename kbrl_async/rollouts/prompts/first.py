"""The first prompt of a rollout: the template alone, or with examples from the index (prompt.option=raicl).

::

    problem ─▶ Retriever (held-out problems guarded) ─▶ render_with_examples ─▶ prompt, names of the examples, version
                  ▲
    verified kernels of training rollouts ─▶ LiveIndex (prompt.live_examples)

Invariants
* An evaluation sees the index on disk only, so that before and after differ by the policy alone.
* Prompt and longest answer fit the model's positions: the sampler would refuse what does not.
* No prompt, of training or evaluation, holds a solution of its own problem or of a held-out one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from kbrl_async.rollouts.prompts import Feedback, TokenBudget, render_prompt, render_turn
from kbrl_async.rollouts.prompts.budget import UNBOUNDED
from kbrl_async.rollouts.prompts.examples import render_with_examples
from kbrl_async.rollouts.retrieval import NO_ADDITIONS, Entry, LiveIndex, Query, Retriever
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.rollouts.settings import Prompt
from protocols.records import Problem, Purpose, RolloutRequest


class FirstPrompt(msgspec.Struct, frozen=True):
    """A prompt and what was retrieved for it."""

    text: str
    examples: tuple[str, ...] = ()
    version: str = ""


class FirstPrompts:
    """Without an index: the template alone."""

    def __init__(
        self, option: str, backend: str, budget: Callable[[], TokenBudget] = TokenBudget, hardware: str = ""
    ) -> None:
        """`budget` is asked for at the first refinement: by then there is a policy, whose tokens count."""
        self._option, self._backend, self._hardware = option, backend, hardware
        self._budget = functools.cache(budget)

    def refined(self, problem: Problem, feedback: Feedback) -> str:
        """The prompt of the turn after `feedback`."""
        return render_turn(self._option, problem, feedback, self._backend, self._budget(), self._hardware)

    def make(self, problem: Problem, purpose: Purpose) -> FirstPrompt:
        budget = self._budget() if "shot" in self._option or self._option.startswith("custom:") else UNBOUNDED
        return FirstPrompt(render_prompt(self._option, problem, self._backend, self._hardware, budget))

    def learn(self, request: RolloutRequest, scored: ScoredTurn) -> None:
        """Takes in what became of a rollout."""


class ExamplePrompts(FirstPrompts):
    """With retrieved examples. `max_tokens` bounds the whole prompt."""

    def __init__(
        self,
        option: str,
        backend: str,
        retriever: Retriever,
        count_tokens: Callable[[str], int],
        max_tokens: int,
        settings: Prompt,
        hardware: str = "",
    ) -> None:
        budget = TokenBudget(max_tokens, count_tokens)
        super().__init__(option, backend, lambda: budget, hardware)
        self._retriever, self._count_tokens, self._max_tokens = retriever, count_tokens, max_tokens
        self._k = settings.examples
        self.live = LiveIndex(settings.live_examples) if settings.live_examples else None
        self._made: dict[tuple[str, int], FirstPrompt] = {}

    def make(self, problem: Problem, purpose: Purpose) -> FirstPrompt:
        snapshot = self.live.snapshot() if self.live is not None and purpose is Purpose.TRAIN else NO_ADDITIONS
        key = problem.problem_id, snapshot.version
        if key not in self._made:
            if len(self._made) > 4096:
                self._made.clear()
            query = Query(problem.source, problem.problem_id, self._backend, self._option == "compact", self._k)
            found = self._retriever.retrieve(query, snapshot)
            prompted = render_with_examples(
                self._option,
                problem,
                found.hits,
                self._count_tokens,
                self._max_tokens,
                self._backend,
                self._hardware,
            )
            names = tuple(found.hits[place].entry.uid for place in prompted.shown)
            self._made[key] = FirstPrompt(prompted.text, names, found.version)
        return self._made[key]

    def learn(self, request: RolloutRequest, scored: ScoredTurn) -> None:
        problem = request.problem
        is_training = request.purpose is Purpose.TRAIN and problem.split != "heldout"
        if self.live is None or not is_training or scored.timing is None or scored.candidate is None:
            return
        self.add(
            Entry(
                uid=f"live:{request.rollout_id}",
                corpus="live",
                reference=problem.source,
                kernel=scored.candidate.source,
                backend=scored.candidate.backend,
                problem_id=problem.problem_id,
                level=problem.level,
                speedup=scored.timing.lo,
                verified=True,
            )
        )

    def add(self, entry: Entry) -> None:
        if self.live is not None:
            self.live.add(entry, *self._retriever.read(entry.reference))
