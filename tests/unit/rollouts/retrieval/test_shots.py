"""The small policy's corpus with worked examples: in the form of raicl prompts, without held-out problems or leaks."""

from __future__ import annotations

import random

import pytest

from kbrl_async.kernels.problems.writing import render_problem
from kbrl_async.kernels.syntax import read
from kbrl_async.lab.small_policy.author import CAREFUL, Habits
from kbrl_async.lab.small_policy.corpus import CorpusExample, LookingUp, Shelf, examples
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS
from kbrl_async.rollouts.prompts import render_prompt
from tests.suite import suite
from tests.unit.rollouts.retrieval.making import module

ALWAYS_WRONG = Habits(bound=1, formula=1, start=1, index=1, syntax=1, name=1, argument=1, fence=1)
HELDOUT_PROMPTS = [render_prompt("compact", p) for p in suite() if p.problem_id in HELDOUT]


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf(random.Random(0), 150)


@pytest.fixture(scope="module")
def corpus() -> list[CorpusExample]:
    return list(examples(3, 600, habits=Habits(), prompt_option="compact", shot_share=0.5))


def test_half_of_the_corpus_holds_examples_when_that_was_asked_for(corpus: list[CorpusExample]) -> None:
    share = sum(example.prompt.count("### ModelNew") > 1 for example in corpus) / len(corpus)
    assert share == pytest.approx(0.5, abs=0.08)


def test_no_held_out_problem_is_in_a_prompt_or_among_its_examples(corpus: list[CorpusExample]) -> None:
    assert not [e for e in corpus if any(heldout in e.prompt for heldout in HELDOUT_PROMPTS)]


def test_nobody_is_shown_the_same_operations(shelf: Shelf) -> None:
    for spec in SPECS.values():
        reference = render_problem(spec.module())
        chain = read(reference).chain_hash
        assert chain not in {read(shown.reference).chain_hash for shown in shelf.nearest(reference, 5)}


def test_the_nearest_share_operations(shelf: Shelf) -> None:
    shown = shelf.nearest(module("x = F.silu(x)", "x = torch.tanh(x)"), 1)[0]
    assert set(shown.operations) & {"silu", "tanh"}


def test_an_author_copies_what_is_shown_and_fails_alone() -> None:
    author = LookingUp(random.Random(0), ALWAYS_WRONG, "v = tanhf(v);")
    copied = [author.slip("formula", "v = tanhf(v);", "v = tanf(v);") == "v = tanhf(v);" for _ in range(200)]
    assert 0.8 < sum(copied) / 200 < 0.98
    assert author.slip("formula", "v = sinf(v);", "v = cosf(v);") == "v = cosf(v);"


def test_without_a_share_the_corpus_is_the_one_it_always_was() -> None:
    with_key, without = (
        list(examples(5, 40, habits=CAREFUL, prompt_option="compact", **share)) for share in ({"shot_share": 0.0}, {})
    )
    assert with_key == without
