from __future__ import annotations

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.generator import chain_of
from kbrl_async.kernels.problems import load_problems, load_suite
from protocols.records import Problem


@pytest.fixture(scope="module")
def drawn() -> list[Problem]:
    return load_problems("grammar:60")


def test_the_suite_comes_with_them_and_alone_holds_out(drawn: list[Problem]) -> None:
    suite = load_suite(levels=(1, 2, 3))
    assert drawn[: len(suite)] == suite
    assert len(drawn) == len(suite) + 60
    assert {problem.split for problem in drawn[len(suite) :]} == {"train"}


def test_none_has_the_operations_of_another_or_of_the_suite(drawn: list[Problem]) -> None:
    held_out = {chain_of(problem.source) for problem in drawn if problem.split == "heldout"}
    made = [chain_of(problem.source) for problem in drawn if "/s0n" in problem.problem_id]
    assert len(set(made)) == 60
    assert not held_out & set(made)


def test_more_of_them_begin_with_the_same_and_another_seed_has_others(drawn: list[Problem]) -> None:
    assert load_problems("grammar:20") == drawn[: len(drawn) - 40]
    assert load_problems("grammar:20:1")[-1].source != drawn[-41].source


@pytest.mark.parametrize("wanted", ["grammar", "grammar:0", "grammar:many", "grammar:5:x"])
def test_what_names_no_number_is_refused(wanted: str) -> None:
    with pytest.raises(ProblemError, match="Write grammar:500"):
        load_problems(wanted)
