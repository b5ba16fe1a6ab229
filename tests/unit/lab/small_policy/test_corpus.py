"""The small policy's corpus: what it may hold, and what it must never hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec
import pytest

from kbrl_async.kernels.problems import load_suite, parse_problem
from kbrl_async.kernels.problems.writing import render_problem
from kbrl_async.lab.small_policy.author import CAREFUL, SLOW, Author, Habits
from kbrl_async.lab.small_policy.corpus import examples, write_example
from kbrl_async.lab.small_policy.families.source import render_answer
from kbrl_async.lab.small_policy.making import MadeOnce, Pair, bucketed, tokenize, train_tokenizer
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS, difficulty, random_spec
from kbrl_async.rollouts.prompts import extract, render_prompt
from kbrl_async.rollouts.prompts.roles import OUTCOMES

SUITE = {problem.problem_id: problem for problem in load_suite()}


def test_every_file_of_the_suite_is_what_its_grammar_renders() -> None:
    rendered = {key: parse_problem(render_problem(spec.module()), key).source for key, spec in SPECS.items()}
    assert rendered == {key: problem.source for key, problem in SUITE.items()}


def test_the_index_of_the_suite_says_which_problems_are_held_out() -> None:
    assert {key for key, problem in SUITE.items() if problem.split == "heldout"} == HELDOUT


def test_difficulty_rises_with_the_level() -> None:
    means = [
        sum(difficulty(s) for k, s in SPECS.items() if k.startswith(level)) / sum(k.startswith(level) for k in SPECS)
        for level in ("L1", "L2", "L3")
    ]
    assert means == sorted(means)


def test_no_prompt_of_the_corpus_is_that_of_a_held_out_problem() -> None:
    forbidden = {render_prompt("compact", SUITE[key]) for key in HELDOUT}
    prompts = {e.prompt for e in examples(3, 4000, habits=Habits(), prompt_option="compact")}
    assert not prompts & forbidden


def test_random_problems_never_equal_a_held_out_one_even_when_only_those_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heldout, other = SPECS["L1/11_silu"], SPECS["L1/01_tanh"]
    draws = iter([heldout, heldout, other])
    monkeypatch.setattr("kbrl_async.lab.small_policy.specs._draw", lambda rng: next(draws))
    assert random_spec(random.Random(0)) is other


def test_the_corpus_is_the_same_for_the_same_seed() -> None:
    first, second = (list(examples(7, 50, habits=Habits(), prompt_option="compact")) for _ in range(2))
    assert first == second


def test_the_corpus_holds_right_and_wrong_answers_so_that_there_is_something_to_find() -> None:
    corpus = list(examples(1, 1000, habits=Habits(), prompt_option="compact"))
    assert 0.1 < sum(not e.slips for e in corpus) / len(corpus) < 0.5


def test_an_author_with_a_slip_writes_another_text_than_a_careful_one() -> None:
    always = Habits(bound=1.0, fast=1.0)
    spec = SPECS["L1/01_tanh"]
    careful = write_example(spec, Author(random.Random(0), CAREFUL), "compact")
    sloppy = write_example(spec, Author(random.Random(0), always), "compact")
    assert careful.answer != sloppy.answer
    assert "bound" in sloppy.slips


@pytest.mark.parametrize("key", sorted(SPECS))
def test_careful_answers_are_candidates_that_can_be_extracted(key: str) -> None:
    spec = SPECS[key]
    for habits in (CAREFUL, SLOW):
        answer = render_answer(
            spec.module(), spec.answer(Author(random.Random(0), habits)), Author(random.Random(0), habits)
        )
        assert extract(answer).source


def test_the_tokenizer_restores_every_text_exactly() -> None:
    corpus = list(examples(2, 300, habits=Habits(), prompt_option="compact"))
    tokenizer = train_tokenizer((e.answer for e in corpus), 1024)
    assert all(tokenizer.decode(tokenizer(e.answer)["input_ids"]) == e.answer for e in corpus[:100])


def test_bucketing_loses_and_doubles_nothing() -> None:
    corpus = list(examples(2, 700, habits=Habits(), prompt_option="compact"))
    tokenizer = train_tokenizer((e.answer for e in corpus), 1024)
    pairs = list(tokenize(corpus, tokenizer))
    assert sorted(bucketed(pairs, 0)) == sorted(pairs)


def test_of_the_corpus_only_what_is_wanted_is_made_and_only_once() -> None:
    made: list[int] = []

    def source() -> Iterator[Pair]:
        for number in range(5):
            made.append(number)
            yield [number], []

    kept = MadeOnce(source())
    assert [pair[0][0] for pair in itertools.islice(kept, 2)] == [0, 1]
    assert made == [0, 1]
    assert [pair[0][0] for pair in itertools.chain(kept, kept)] == [*range(5), *range(5)]
    assert made == [0, 1, 2, 3, 4]


def test_second_turns_repair_what_the_first_got_wrong_more_often_than_not() -> None:
    made = list(examples(0, 400, habits=Habits(), prompt_option="compact", turn_share=0.5, verdict_share=0.2))
    turns = [e for e in made if "### Feedback: " in e.prompt]
    verdicts = [e for e in made if e.prompt.endswith("### Verdict\n")]
    first = [e for e in made if "### Attempt" not in e.prompt]
    assert 150 < len(turns) < 250
    assert 40 < len(verdicts) < 130
    assert all(e.answer.strip() in OUTCOMES for e in verdicts)
    assert sum(not e.slips for e in turns) / len(turns) > 0.5 > sum(not e.slips for e in first) / len(first)


def test_a_repair_keeps_the_style_of_what_it_repairs() -> None:
    broken = Author(random.Random(3), msgspec.structs.replace(CAREFUL, syntax=1.0, fast=0.5), slips=random.Random(1))
    mended = Author(random.Random(3), msgspec.structs.replace(CAREFUL, fast=0.5), slips=random.Random(2))
    spec = SPECS["L1/13_softmax"]
    first, second = spec.answer(broken).kernel, spec.answer(mended).kernel
    assert first != second
    assert sum(a == b for a, b in zip(first, second, strict=False)) >= len(second) - 2
