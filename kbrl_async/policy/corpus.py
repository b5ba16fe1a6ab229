"""The corpus of the small policy: prompts of the suite's grammar with answers of a fallible author.

Invariants
* No held-out problem is in it: neither its file nor its grammar (`random_spec` never draws one).
* Deterministic in its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from kbrl_async.policy.author import Author, Habits
from kbrl_async.policy.families.source import Family, render_answer, render_problem
from kbrl_async.policy.specs import HELDOUT, SPECS, random_spec
from kbrl_async.problems import parse_problem
from kbrl_async.prompts import render_prompt


class Example(msgspec.Struct, frozen=True):
    """One pair for SFT; `slips` names what is wrong in the answer (empty: correct)."""

    prompt: str
    answer: str
    slips: tuple[str, ...] = ()


def examples(
    seed: int, count: int, *, habits: Habits, prompt_option: str, suite_share: float = 0.4
) -> Iterator[Example]:
    """`count` examples, `suite_share` of them on the suite's training problems, the others on problems like them."""
    rng = random.Random(seed)
    suite = [spec for problem_id, spec in SPECS.items() if problem_id not in HELDOUT]
    for _ in range(count):
        spec = rng.choice(suite) if rng.random() < suite_share else random_spec(rng)
        yield write_example(spec, Author(rng, habits), prompt_option)


def write_example(spec: Family, author: Author, prompt_option: str) -> Example:
    module = spec.module()
    problem = parse_problem(render_problem(module), "corpus")
    answer = render_answer(module, spec.answer(author), author)
    return Example(render_prompt(prompt_option, problem), answer, tuple(author.slips))
