"""The candidate is found in whatever a policy answers, and what is wrong with an answer is said."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.kernels.answers.thoughts import without_thoughts
from kbrl_async.rollouts.prompts import extract
from tests.unit.rollouts.prompts.corpus import CASES, MODEL, f

SOURCES = "class ModelNew", "PLAN ="


@pytest.mark.parametrize(("response", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_messy_response_gives_what_its_author_meant(response: str, wanted: str) -> None:
    found = extract(response)
    if any(word in wanted for word in SOURCES) and "\n" in wanted:
        assert found.source == wanted
        assert not found.problem
    else:
        assert not found.source
        assert wanted in found.problem


def test_the_corpus_is_large_and_its_names_are_its_own() -> None:
    assert len(CASES) >= 100
    assert len({name for name, _, _ in CASES}) == len(CASES)


def test_a_thought_that_the_template_opened_and_nobody_closed_holds_no_answer() -> None:
    assert extract(f(MODEL)).source == MODEL
    assert extract(f(MODEL), opened_thought=True).source == ""
    assert extract("so</think>" + f(MODEL), opened_thought=True).source == MODEL


@given(st.text(alphabet="`~\n> <KERNL/thinkclassMode()w:=#'\"", max_size=200))
def test_no_response_breaks_the_extraction(response: str) -> None:
    found = extract(response)
    assert bool(found.source) != bool(found.problem)
    assert len(without_thoughts(response)) <= len(response)


def test_thousands_of_fences_take_no_time() -> None:
    started = time.process_time()
    extract("```python\nclass ModelNew:\n def forward(:\n```\n" * 2000)
    assert time.process_time() - started < 5.0
