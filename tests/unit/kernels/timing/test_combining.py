"""The weighted geometric mean of several workloads' speedups, and its interval."""

from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest

from kbrl_async.kernels.timing.combining import Part, combined
from kbrl_async.kernels.timing.statistics import median_interval
from protocols.records import DISTURBED, Timing


def part(
    speedup: float, weight: float = 1.0, *, n: int = 15, noise: float = 0.05, seed: int = 0, share: float = 0.0
) -> Part:
    rng = random.Random(seed)
    ratios = [speedup * math.exp(rng.gauss(0, noise)) for _ in range(n)]
    interval = median_interval(ratios, 0.98)
    lo, hi = interval.lo / (1 + share), interval.hi * (1 + share)
    timing = Timing(n, interval.median, lo, hi, 1.0, speedup, resolution=share)
    return Part(f"w{seed}", weight, timing, ratios)


def test_it_is_the_weighted_geometric_mean_with_each_workload_beside_it() -> None:
    found = combined([part(4.0, 3.0, noise=0.0), part(0.25, 1.0, noise=0.0, seed=1)])
    assert found.speedup == pytest.approx(4.0**0.75 * 0.25**0.25)
    assert [(one.name, one.weight) for one in found.workloads] == [("w0", 0.75), ("w1", 0.25)]
    assert found.reference_ms == pytest.approx(0.75 * 4.0 + 0.25 * 0.25)
    assert found.n == 30
    assert found.ratios == ()


def test_the_same_pairs_give_the_same_interval() -> None:
    parts = [part(1.2), part(0.9, seed=1)]
    assert combined(parts) == combined(parts)


def test_the_interval_covers_as_often_as_it_says_and_narrows_with_workloads() -> None:
    missed, widths = 0, {1: list[float](), 4: list[float]()}
    for trial in range(150):
        for count in widths:
            found = combined([part(1.5, n=9, noise=0.1, seed=97 * trial + one) for one in range(count)])
            missed += not found.lo <= 1.5 <= found.hi
            widths[count].append(math.log(found.hi / found.lo))
    assert missed <= 300 * 0.04
    assert statistics.median(widths[4]) < 0.7 * statistics.median(widths[1])


def test_what_sampling_can_not_remove_does_not_average_out() -> None:
    exact = combined([part(1.5, noise=0.0, seed=one, share=0.02) for one in range(8)])
    assert exact.lo == pytest.approx(1.5 / 1.02)
    assert exact.hi == pytest.approx(1.5 * 1.02)


def test_what_is_held_against_one_workload_lowers_the_whole() -> None:
    doubted = part(1.5, noise=0.02, seed=1)
    doubted = msgspec.structs.replace(doubted, timing=msgspec.structs.replace(doubted.timing, lo=0.3))
    assert combined([part(1.5, noise=0.02), doubted]).lo < 0.75


def test_a_disturbed_workload_claims_nothing_for_the_whole() -> None:
    other = part(3.0, noise=0.01, seed=1)
    other = msgspec.structs.replace(other, timing=msgspec.structs.replace(other.timing, stopped=DISTURBED))
    found = combined([part(3.0, noise=0.01), other])
    assert found.is_disturbed
    assert not found.is_faster


def test_one_pair_of_a_workload_says_nothing() -> None:
    blind = part(2.0, seed=1)
    timing = msgspec.structs.replace(blind.timing, n=1, lo=0.0, hi=math.inf)
    found = combined([part(2.0), msgspec.structs.replace(blind, timing=timing, ratios=[2.0])])
    assert found.lo == 0.0
    assert found.hi == math.inf
