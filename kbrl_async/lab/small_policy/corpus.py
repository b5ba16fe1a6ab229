"""The corpus of the small policy: prompts of the suite's grammar with answers of a fallible author.

Invariants
* No held-out problem is in it: neither its file nor its grammar (`random_spec` never draws one).
* Deterministic in its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.lab.small_policy.author import CAREFUL, Author, Habits
from kbrl_async.lab.small_policy.families.source import Family, render_problem
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.shots import Shelf
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS, random_spec
from kbrl_async.rollouts.prompts import Feedback, extract, render_prompt, render_turn
from kbrl_async.rollouts.prompts.roles import render_verifier
from protocols.records import Fault


class Example(msgspec.Struct, frozen=True):
    """One pair for SFT; `slips` names what is wrong in the answer (empty: correct)."""

    prompt: str
    answer: str
    slips: tuple[str, ...] = ()


def examples(
    seed: int,
    count: int,
    *,
    habits: Habits,
    prompt_option: str,
    suite_share: float = 0.4,
    turn_share: float = 0.0,
    verdict_share: float = 0.0,
    shot_share: float = 0.0,
    backend: str = "c",
) -> Iterator[Example]:
    """`count` examples, `suite_share` of them on the suite's training problems, the others on problems like them.

    `turn_share` of them are second turns: the prompt holds an attempt and its feedback, the answer often repairs it;
    `verdict_share` hold an attempt and answer with what becomes of it; `shot_share` of the rest hold worked examples.
    `backend` is what the answers are written in: see `languages`.
    """
    rng = random.Random(seed)
    suite = [spec for problem_id, spec in SPECS.items() if problem_id not in HELDOUT]
    shelf = Shelf(random.Random(seed), backend=backend) if shot_share else None
    for _ in range(count):
        spec = rng.choice(suite) if rng.random() < suite_share else random_spec(rng)
        if turn_share and rng.random() < turn_share:
            yield write_turn(spec, rng, habits, prompt_option, backend)
        elif verdict_share and rng.random() < verdict_share / (1 - turn_share):
            yield write_verdict(spec, rng, habits, prompt_option, backend)
        elif shelf is not None and rng.random() < shot_share:
            yield Example(*shelf.write(spec, rng, habits, prompt_option))
        else:
            yield write_example(spec, Author(rng, habits), prompt_option, backend)


def write_example(spec: Family, author: Author, prompt_option: str, backend: str = "c") -> Example:
    problem = parse_problem(render_problem(spec.module()), "corpus")
    answer = respond(spec, author, backend)
    return Example(render_prompt(prompt_option, problem, backend), answer, tuple(author.slips))


REPAIRED = 0.6
"""Share of second turns without a slip; the others are as fallible as first ones, so that RL has something to find."""
_CATEGORIES = {"fence": "format", "syntax": "compile", "name": "compile", "argument": "runtime"}


def write_turn(spec: Family, rng: random.Random, habits: Habits, prompt_option: str, backend: str = "c") -> Example:
    """An attempt, what became of it, and a second attempt in the same style that mostly mends or quickens it."""
    is_fast, style = rng.random() < habits.fast, rng.getrandbits(32)
    once = msgspec.structs.replace(habits, fast=float(is_fast))
    attempt = Author(random.Random(style), once, slips=rng)
    source = extract(respond(spec, attempt, backend)).source
    mended = CAREFUL if rng.random() < REPAIRED else habits
    faster = is_fast or not attempt.slips
    second = Author(random.Random(style), msgspec.structs.replace(mended, fast=float(faster)), slips=rng)
    answer = respond(spec, second, backend)
    problem = parse_problem(render_problem(spec.module()), "corpus")
    feedback = Feedback(Fault.OK, category_of(attempt.slips, is_fast=is_fast), kernel=source)
    return Example(render_turn(prompt_option, problem, feedback, backend), answer, tuple(second.slips))


def write_verdict(spec: Family, rng: random.Random, habits: Habits, prompt_option: str, backend: str = "c") -> Example:
    """An attempt and the verdict it earns, for the verifier's role."""
    is_fast = rng.random() < habits.fast
    author = Author(rng, msgspec.structs.replace(habits, fast=float(is_fast)))
    source = extract(respond(spec, author, backend)).source
    problem = parse_problem(render_problem(spec.module()), "corpus")
    prompt = render_verifier(prompt_option, problem, source)
    return Example(prompt, f"{category_of(author.slips, is_fast=is_fast)}\n", tuple(author.slips))


def category_of(slips: Sequence[str], *, is_fast: bool) -> str:
    """What the funnel would say of an answer with these slips: the first stage that one of them fails."""
    if not slips:
        return "fast" if is_fast else "slow"
    found = {_CATEGORIES.get(slip, "mismatch") for slip in slips}
    return next(category for category in ("format", "compile", "runtime", "mismatch") if category in found)
