"""Finding one problem by what a person types."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import UserError
from kbrl_async.kernels.problems import find_problem, load_suite
from kbrl_async.kernels.problems.finding import choose, nearest


@pytest.mark.parametrize("wanted", ["L1/13_softmax", "level1/13_softmax.py", "L1/13", "1/13", "13_softmax", "softmax"])
def test_many_ways_of_writing_name_one_problem(wanted: str) -> None:
    assert find_problem(wanted).problem_id == "L1/13_softmax"


def test_a_part_of_a_name_is_enough_where_it_fits_only_one() -> None:
    assert find_problem("depthwise").problem_id == "L1/24_depthwise_conv"


def test_what_fits_several_is_not_guessed() -> None:
    with pytest.raises(UserError, match="names 2 problems"):
        choose("log_s", load_suite())


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no problem 'sofmax'.*L1/13_softmax"):
        find_problem("sofmax")
    assert nearest("L1/13_sofmax", [p.problem_id for p in load_suite()])[0] == "L1/13_softmax"


def test_a_file_is_a_problem_and_a_missing_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Model: pass\ndef get_inputs(): pass\ndef get_init_inputs(): pass\n")
    assert find_problem(str(path)).name == "mine"
    with pytest.raises(UserError, match="no problem file"):
        find_problem(str(tmp_path / "other.py"))
