"""Corpus examples whose prompt holds worked examples, as prompt.option=raicl makes them.

An author who has right kernels before them looks things up: what stands in one of them is mostly written as it stands
there, and only what the author must find alone is as fallible as ever. So the small policy can learn to read examples.

Invariants
* The shelf holds problems of the corpus only: no held-out one.
* Nobody is shown a problem with the same chain of operations, as the leak rules of retrieval demand.
"""

from __future__ import annotations

import random

import msgspec

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.lab.small_policy.author import CAREFUL, Author, Habits
from kbrl_async.lab.small_policy.families.source import Family, render_problem
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS, random_spec
from kbrl_async.rollouts.prompts import extract
from kbrl_async.rollouts.prompts.examples import render_with_examples
from kbrl_async.rollouts.retrieval.code.operations import operations
from kbrl_async.rollouts.retrieval.code.scope import Scope

SHELF = 400
MOST_SHOWN = 3
LOOKED_AT = 0.9
"""Probability that the author copies what an example shows."""


class Shown(msgspec.Struct, frozen=True):
    """A right kernel on the shelf; the fields that `prompts.examples` wants."""

    reference: str
    kernel: str
    operations: tuple[str, ...]
    speedup: float | None = None


class LookingUp(Author):
    """Copies what `shown` holds with probability `LOOKED_AT`; else as fallible as the habits."""

    def __init__(self, rng: random.Random, habits: Habits, shown: str) -> None:
        super().__init__(rng, habits)
        self._shown = shown

    def slip(self, kind: str, right: str, *wrong: str) -> str:
        if wrong and right in self._shown and self.rng.random() < LOOKED_AT:
            return right
        return super().slip(kind, right, *wrong)


class Shelf:
    """Right kernels for the suite's training problems and problems like them, drawn once."""

    def __init__(self, rng: random.Random, size: int = SHELF, backend: str = "c") -> None:
        self._backend = backend
        suite = [spec for problem_id, spec in SPECS.items() if problem_id not in HELDOUT]
        specs = [*suite, *(random_spec(rng) for _ in range(size - len(suite)))]
        self._shown = [self._written(spec, Author(rng, msgspec.structs.replace(CAREFUL, fast=0.5))) for spec in specs]

    def _written(self, spec: Family, author: Author) -> Shown:
        reference = render_problem(spec.module())
        kernel = extract(respond(spec, author, self._backend)).source
        return Shown(reference, kernel, operations(Scope(reference)))

    def nearest(self, reference: str, count: int) -> list[Shown]:
        """The ones that share the most operations with a reference, without those that are its near-copies."""
        wanted = operations(Scope(reference))
        others = [shown for shown in self._shown if shown.operations != wanted]
        return sorted(others, key=lambda shown: -_overlap(set(wanted), set(shown.operations)))[:count]

    def write(
        self, spec: Family, rng: random.Random, habits: Habits, prompt_option: str
    ) -> tuple[str, str, tuple[str, ...]]:
        """Prompt, answer and its slips."""
        problem = parse_problem(render_problem(spec.module()), "corpus")
        shown = self.nearest(problem.source, rng.randint(1, MOST_SHOWN))
        author = LookingUp(rng, habits, "\n".join(example.kernel for example in shown))
        answer = respond(spec, author, self._backend)
        prompt = render_with_examples(prompt_option, problem, shown, len, 1 << 30, self._backend).text
        return prompt, answer, tuple(author.slips)


def _overlap(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))
