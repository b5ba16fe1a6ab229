"""The figures of an evaluation against closed forms and exact counting."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from kbrl_async.evaluation.metrics import (
    EAGER,
    Sample,
    by_problem,
    fast_p,
    geometric_mean,
    geometric_mean_speedup,
    median_speedup,
    pass_at_k,
    share,
    values_k,
)


def sample(problem: str, number: int, speedup: float | None = None, *, correct: bool | None = None) -> Sample:
    speeds = {} if speedup is None else {EAGER: (speedup, speedup * 0.9, speedup * 1.1)}
    right = speedup is not None if correct is None else correct
    return Sample(problem_id=problem, level=1, sample=number, compiled=True, correct=right, speedups=speeds)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 1), (4, 1, 2), (5, 2, 3), (6, 3, 3), (3, 0, 2), (3, 3, 1), (7, 5, 4)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(n: int, c: int, k: int) -> None:
    right = [i < c for i in range(n)]
    draws = list(itertools.combinations(right, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over many sets of n samples is 1 − (1 − p)^k, which the plug-in estimate is not."""
    rng, p, n, k = random.Random(0), 0.3, 5, 3
    counts = [sum(rng.random() < p for _ in range(n)) for _ in range(20_000)]
    truth = 1 - (1 - p) ** k
    assert np.mean([pass_at_k(n, c, k) for c in counts]) == pytest.approx(truth, abs=0.01)
    assert abs(np.mean([1 - (1 - c / n) ** k for c in counts]) - truth) > 0.02


def test_more_draws_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        pass_at_k(3, 1, 4)


def test_fast_p_is_strict_and_counts_wrong_samples() -> None:
    speedups = [1.0, 1.0, 2.0, None]
    assert fast_p(speedups, 1.0) == 0.25
    assert fast_p(speedups, 0.999) == 0.75
    assert fast_p(speedups, 2.0) == 0.0
    assert fast_p([0.5, None], 0.0) == 0.5


def test_a_wrong_sample_has_no_speedup_whatever_was_measured() -> None:
    assert sample("L1/1_a", 0, 9.0, correct=False).speedup() is None


def test_geometric_means_let_a_double_and_a_half_cancel() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([]) is None


def test_problems_weigh_alike_however_many_samples_have_a_verdict() -> None:
    clusters = by_problem([sample("L1/1_a", 0, 2.0), *(sample("L1/2_b", i) for i in range(3))])
    assert share(clusters, lambda s: s.correct).value == 0.5


def test_the_interval_of_a_rate_is_that_of_the_binomial() -> None:
    """One sample a problem, half of 100 right: the percentile interval is p ± 1.96·√(p(1−p)/n)."""
    clusters = by_problem([sample(f"L1/{i}_x", 0, 2.0 if i % 2 else None) for i in range(100)])
    figure = share(clusters, lambda s: s.correct)
    half = 1.96 * math.sqrt(0.25 / 100)
    assert (figure.lo, figure.hi) == pytest.approx((0.5 - half, 0.5 + half), abs=0.02)


def test_samples_of_one_problem_are_resampled_together() -> None:
    """Eight samples that always agree tell no more than one: the interval does not shrink."""
    one = by_problem([sample(f"L1/{i}_x", 0, 2.0 if i % 2 else None) for i in range(20)])
    eight = by_problem([sample(f"L1/{i}_x", j, 2.0 if i % 2 else None) for i in range(20) for j in range(8)])
    narrow, wide = (share(c, lambda s: s.correct, seed=1) for c in (one, eight))
    assert wide.hi - wide.lo == pytest.approx(narrow.hi - narrow.lo)


def test_speedup_intervals_hold_their_value_and_skip_problems_without_one() -> None:
    listed = [sample(f"L1/{i}_x", j, 1.0 + i / 10 + j / 100) for i in range(8) for j in range(2)]
    clusters = by_problem([*listed, sample("L1/9_y", 0)])
    for figure in (geometric_mean_speedup(clusters, EAGER), median_speedup(clusters, EAGER)):
        assert figure is not None
        assert 1.0 < figure.lo < figure.value < figure.hi < 1.8
    speedups = [s.speedup() or 0.0 for s in listed]
    found = geometric_mean_speedup(clusters, EAGER)
    assert found is not None
    assert found.value == pytest.approx(geometric_mean(speedups))
    assert median_speedup(by_problem([sample("L1/9_y", 0)]), EAGER) is None


def test_one_problem_has_no_interval_and_no_warning() -> None:
    figure = share(by_problem([sample("L1/1_a", 0, 2.0), sample("L1/1_a", 1)]), lambda s: s.correct)
    assert (figure.lo, figure.value, figure.hi) == (0.5, 0.5, 0.5)


def test_k_goes_up_to_the_number_of_samples() -> None:
    listed = [sample("L1/1_a", i) for i in range(6)] + [sample("L1/2_b", i) for i in range(5)]
    assert values_k(listed) == [1, 2, 4, 6]
    assert values_k([]) == []
