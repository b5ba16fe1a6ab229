"""The corpus of the small policy: prompts of the suite's grammar with answers of a fallible author.

Invariants
* No held-out problem is in it: neither its file nor its grammar (`random_spec` never draws one).
* Deterministic in its seed.
* Nobody is shown a problem with the same chain of operations, as the leak rules of retrieval demand.

An author who has right kernels before them looks things up: what stands in one of them is mostly written as it stands
there, and only what the author must find alone is as fallible as ever. So the small policy can learn to read examples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.problems.writing import render_problem
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from kbrl_async.lab.small_policy.author import CAREFUL, UNBUILT, Author, Habits
from kbrl_async.lab.small_policy.families.source import ProblemFamily
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS, random_spec
from kbrl_async.rollouts.prompts import Feedback, extract, render_prompt, render_turn
from kbrl_async.rollouts.prompts.examples import render_with_examples
from kbrl_async.rollouts.prompts.roles import render_verifier
from protocols.records import Fault


class CorpusExample(msgspec.Struct, frozen=True):
    """One pair for SFT; `slips` names what is wrong in the answer (empty: correct)."""

    prompt: str
    answer: str
    slips: tuple[str, ...] = ()


SUITE_SHARE = 0.15
"""More of it is learnt by heart: at 0.4 operations were found where the suite has them, and nowhere else."""


def examples(
    seed: int,
    count: int,
    *,
    habits: Habits,
    prompt_option: str,
    suite_share: float = SUITE_SHARE,
    turn_share: float = 0.0,
    verdict_share: float = 0.0,
    shot_share: float = 0.0,
    backend: str = "c",
) -> Iterator[CorpusExample]:
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
            yield CorpusExample(*shelf.write(spec, rng, habits, prompt_option))
        else:
            yield write_example(spec, Author(rng, habits), prompt_option, backend)


def write_example(spec: ProblemFamily, author: Author, prompt_option: str, backend: str = "c") -> CorpusExample:
    problem = parse_problem(render_problem(spec.module()), "corpus")
    answer = respond(spec, author, backend)
    return CorpusExample(render_prompt(prompt_option, problem, backend), answer, tuple(author.slips))


REPAIRED = 0.6
"""Share of second turns without a slip; the others are as fallible as first ones, so that RL has something to find."""
_CATEGORIES = {"fence": "format", **dict.fromkeys(UNBUILT, "compile"), "argument": "runtime"}


def write_turn(
    spec: ProblemFamily, rng: random.Random, habits: Habits, prompt_option: str, backend: str = "c"
) -> CorpusExample:
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
    category = category_of(attempt.slips, is_fast=is_fast)
    error = error_of(source, attempt.unbuilt) if category == "compile" else ""
    feedback = Feedback(Fault.OK, category, error, kernel=source)
    return CorpusExample(render_turn(prompt_option, problem, feedback, backend), answer, tuple(second.slips))


def error_of(source: str, unbuilt: Sequence[str]) -> str:
    """What a compiler would say of the first of these lines, as far as a prompt tells of it."""
    lines = source.partition('"""')[2].split("\n")
    return next((f"kernel.c:{n}" for n, line in enumerate(lines, start=1) if line.endswith(tuple(unbuilt))), "")


def write_verdict(
    spec: ProblemFamily, rng: random.Random, habits: Habits, prompt_option: str, backend: str = "c"
) -> CorpusExample:
    """An attempt and the verdict it earns, for the verifier's role."""
    is_fast = rng.random() < habits.fast
    author = Author(rng, msgspec.structs.replace(habits, fast=float(is_fast)))
    source = extract(respond(spec, author, backend)).source
    problem = parse_problem(render_problem(spec.module()), "corpus")
    prompt = render_verifier(prompt_option, problem, source)
    return CorpusExample(prompt, f"{category_of(author.slips, is_fast=is_fast)}\n", tuple(author.slips))


def category_of(slips: Sequence[str], *, is_fast: bool) -> str:
    """What the funnel would say of an answer with these slips: the first stage that one of them fails."""
    if not slips:
        return "fast" if is_fast else "slow"
    found = {_CATEGORIES.get(slip, "mismatch") for slip in slips}
    return next(category for category in ("format", "compile", "runtime", "mismatch") if category in found)


# ── prompts that hold worked examples, as prompt.option=raicl makes them ─────────────────────────────────────────────


SHELF = 400
MOST_SHOWN = 3
LOOKED_AT = 0.9
"""Probability that the author copies what an example shows."""


class ShelfKernel(msgspec.Struct, frozen=True):
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

    def _written(self, spec: ProblemFamily, author: Author) -> ShelfKernel:
        reference = render_problem(spec.module())
        kernel = extract(respond(spec, author, self._backend)).source
        return ShelfKernel(reference, kernel, operations(Scope(reference)))

    def nearest(self, reference: str, count: int) -> list[ShelfKernel]:
        """The ones that share the most operations with a reference, without those that are its near-copies."""
        wanted = operations(Scope(reference))
        others = [shown for shown in self._shown if shown.operations != wanted]
        return sorted(others, key=lambda shown: -_overlap(set(wanted), set(shown.operations)))[:count]

    def write(
        self, spec: ProblemFamily, rng: random.Random, habits: Habits, prompt_option: str
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
