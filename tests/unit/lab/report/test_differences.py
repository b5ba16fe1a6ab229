"""Differences with an interval of their own: by hand, and by how often they hold the truth."""

from __future__ import annotations

import math
import random

import pytest

from kbrl_async.evaluation.proportions import clustered_share, wilson
from kbrl_async.lab.report import differences, numbers
from kbrl_async.lab.report.differences import Delta


def test_two_shares_have_newcombe_s_interval() -> None:
    """The example of Newcombe (1998): 56 of 70 against 48 of 80, method 10: .0524 … .3339."""
    found = differences.of_figures(48 / 80, wilson(48, 80), 56 / 70, wilson(56, 70))
    assert found is not None
    assert found == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert found.is_told


def test_the_other_way_round_it_is_the_same_with_its_sign_changed() -> None:
    one, two = (0.6, (0.49, 0.7)), (0.8, (0.7, 0.88))
    there, back = differences.of_figures(*one, *two), differences.of_figures(*two, *one)
    assert there is not None
    assert back is not None
    assert there == pytest.approx((-back.value, -back.high, -back.low))


def test_a_figure_without_an_interval_has_no_difference() -> None:
    assert differences.of_figures(0.5, None, 0.6, (0.5, 0.7)) is None
    assert differences.of_ratios(0.0, (0.0, 1.0), 2.0, (1.5, 2.5)) is None


def test_speedups_are_compared_by_their_factor() -> None:
    found = differences.of_ratios(1.0, (0.8, 1.25), 2.0, (1.6, 2.5))
    assert found is not None
    assert math.exp(found.value) == pytest.approx(2.0)
    assert [math.exp(end) for end in found[1:]] == pytest.approx([2 / 1.25**2**0.5, 2 * 1.25**2**0.5])


def test_the_same_problems_are_paired() -> None:
    """Student's t with 2 degrees of freedom: .5 ± 4.3027 · .5/√3."""
    before = {"a": [0.0, 0.0], "b": [0.0, 1.0], "c": [1.0, 1.0], "only before": [1.0]}
    after = {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 1.0], "only after": [0.0]}
    found, common = differences.paired(before, after)
    assert common == 3
    assert found is not None
    assert found == pytest.approx((0.5, 0.5 - 4.302653 * 0.5 / 3**0.5, 0.5 + 4.302653 * 0.5 / 3**0.5), abs=1e-5)
    assert not found.is_told


def test_problems_that_all_changed_alike_do_not_make_it_certain() -> None:
    none = {name: [0.0] * 4 for name in "abcdef"}
    found, _ = differences.paired(none, none)
    assert found is not None
    assert found.low < 0 < found.high
    every = {name: [1.0] * 4 for name in "abcdef"}
    changed, _ = differences.paired(none, every)
    assert changed is not None
    assert changed.value == 1.0
    assert 0 < changed.low < 1.0


def test_one_common_problem_tells_nothing() -> None:
    assert differences.paired({"a": [0.0]}, {"a": [1.0]}) == (None, 1)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_groups_that_do_not_differ_are_told_apart_one_time_in_twenty(share: float) -> None:
    """16 groups of 8 against 16 others, each of a problem of its own hardness."""
    draw = random.Random(3)

    def figure() -> tuple[float, tuple[float, float]]:
        chances = [min(1.0, max(0.0, draw.gauss(share, 0.15))) for _ in range(16)]
        hits = [[draw.random() < chance for _ in range(8)] for chance in chances]
        return sum(map(sum, hits)) / 128, clustered_share(hits)

    trials = [differences.of_figures(*figure(), *figure()) for _ in range(300)]
    told = sum(found is not None and found.is_told for found in trials)
    assert told / len(trials) < 0.08


def test_they_are_written_in_points() -> None:
    assert numbers.points(Delta(0.128, -0.041, 0.3)) == "+13 points, −4 … +30"
