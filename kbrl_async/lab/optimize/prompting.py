"""The prompts of a search: the first one, with worked examples where there are any, and that of a refinement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kbrl_async.kernels.funnel import Result
from kbrl_async.rollouts.prompts import TokenBudget, feedback_of, render_prompt, render_turn
from kbrl_async.rollouts.prompts.examples import Worked, render_with_examples
from protocols.records import Problem


class PromptMaker:
    """`max_tokens` bounds every prompt: examples that exceed it are left out, so are whole parts of the feedback."""

    def __init__(
        self,
        option: str,
        problem: Problem,
        backend: str,
        examples: Sequence[Worked] = (),
        count_tokens: Callable[[str], int] = len,
        max_tokens: int = 1 << 30,
    ) -> None:
        self._option, self._problem, self._backend = option, problem, backend
        self._budget = TokenBudget(max_tokens, count_tokens)
        self._first = render_prompt(option, problem, backend)
        self.shown: tuple[int, ...] = ()
        """Which of the examples are in the first prompt."""
        if examples:
            made = render_with_examples(option, problem, examples, count_tokens, max_tokens, backend)
            self._first, self.shown = made.text, made.shown

    def first(self) -> str:
        return self._first

    def turn(self, result: Result, source: str) -> str:
        feedback = feedback_of(result.verdict, result.timing, source, self._backend)
        return render_turn(self._option, self._problem, feedback, self._backend, self._budget)
