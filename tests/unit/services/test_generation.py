"""Which tokens of an answer are its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.rollouts.prompts import extract, kernel_span
from services.sampler.generation import token_span

WORDS = ["plan ", "it", "\n", "co", "de", "<end>"]
"""`<end>` is a special token: it has no text."""


def decode(ids: Sequence[int]) -> str:
    return "".join("" if WORDS[i] == "<end>" else WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("start", "end", "span"),
    [
        (8, 12, (3, 5)),
        (0, 5, (0, 1)),
        (9, 11, (3, 5)),
        (8, 10, (3, 4)),
        (5, 8, (1, 3)),
        (0, 0, (0, 0)),
        (0, 12, (0, 5)),
    ],
)
def test_the_span_holds_every_token_that_wrote_one_of_the_characters(
    start: int, end: int, span: tuple[int, int]
) -> None:
    assert token_span(decode, [0, 1, 2, 3, 4, 5], start, end) == span


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4]), min_size=1, max_size=12), st.data())
def test_it_is_what_counting_character_by_character_finds(ids: list[int], data: st.DataObject) -> None:
    text = decode(ids)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    writers = [place for place, i in enumerate(ids) for _ in WORDS[i]]
    assert token_span(decode, ids, start, end) == (writers[start], writers[end - 1] + 1)


ANSWER = "first a thought\n```python\nclass ModelNew:\n    def forward(self): ...\n```\nand a remark\n"


def test_the_kernels_characters_are_those_that_were_taken_out() -> None:
    source = extract(ANSWER).source
    start, end = kernel_span(ANSWER, source)
    assert ANSWER[start:end] == source.rstrip()
    assert ANSWER[:start].endswith("```python\n")


def test_of_two_blocks_the_kernel_is_the_one_that_counts() -> None:
    twice = ANSWER + ANSWER
    start, _ = kernel_span(twice, extract(twice).source)
    assert start > len(ANSWER)


def test_a_source_that_is_not_in_the_answer_has_no_place() -> None:
    assert kernel_span(ANSWER, "class Other") == (0, 0)
    assert kernel_span(ANSWER, "") == (0, 0)
