"""The statistics of paired ratios against what theory says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.timing import Interval, median_interval, stop_reason, widened


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        interval = median_interval([rng.lognormvariate(0, 0.3) for _ in range(20)])
        hits += interval.lo <= 1.0 <= interval.hi
    assert 0.94 < hits / 2000 < 0.985


def test_a_no_better_candidate_is_rarely_called_faster() -> None:
    rng = random.Random(2)
    wins = sum(median_interval([rng.lognormvariate(0, 0.1) for _ in range(16)]).lo > 1 for _ in range(2000))
    assert wins / 2000 < 0.035


@pytest.mark.parametrize(("n", "lo", "hi"), [(8, 0, 7), (9, 1, 7), (17, 4, 12), (40, 13, 26)])
def test_known_ranks_of_the_sign_test(n: int, lo: int, hi: int) -> None:
    interval = median_interval([float(i + 1) for i in range(n)])
    assert (interval.lo, interval.hi) == (lo + 1, hi + 1)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_the_median_lies_in_its_interval_and_order_does_not_matter(ratios: list[float]) -> None:
    interval = median_interval(ratios)
    assert interval.lo <= interval.median <= interval.hi
    assert interval == median_interval(ratios[::-1])


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])


@pytest.mark.parametrize(
    ("interval", "n", "reason"),
    [
        (Interval(2.0, 1.99, 2.01), 8, "resolved"),
        (Interval(1.0, 0.99, 1.01), 8, "resolved"),
        (Interval(2.0, 1.9, 2.2), 8, "decided"),
        (Interval(0.5, 0.47, 0.54), 8, "decided"),
        (Interval(1.05, 1.01, 1.2), 8, ""),
        (Interval(2.0, 1.2, 3.0), 8, ""),
        (Interval(2.0, 1.99, 2.01), 7, ""),
    ],
)
def test_sampling_stops_for_a_reason(interval: Interval, n: int, reason: str) -> None:
    assert stop_reason(interval, n, minimum=8, resolution=0.03, margin=0.05) == reason


def test_a_systematic_part_widens_both_sides() -> None:
    assert widened(Interval(1.0, 0.99, 1.0), 0.02) == Interval(1.0, 0.99 / 1.02, 1.02)
