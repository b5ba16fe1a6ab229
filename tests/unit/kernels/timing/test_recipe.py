"""The recipe with a sampler and a clock of our own: nothing here measures anything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Pair, Point, Recipe, measure, share_at
from kbrl_async.kernels.timing.cpu.host import CacheFlush, CoreUse, hardware, l2_bytes, pinned, taken_by_others


def ticking(step: float) -> Callable[[], float]:
    counter = itertools.count()
    return lambda: next(counter) * step


def noisy(speedup: float, noise: float, seed: int = 0) -> Callable[[], Pair]:
    rng = random.Random(seed)
    return lambda: Pair(1000 * speedup * rng.lognormvariate(0, noise), 1000 * rng.lognormvariate(0, noise))


def test_a_quiet_measurement_is_resolved_early() -> None:
    found = measure(noisy(2.0, 0.001), Recipe.of(TimingBench()), ticking(0.0))
    assert (found.stopped, found.n) == ("resolved", 10)
    assert found.interval.median == pytest.approx(2.0, rel=0.01)


def test_what_is_clearly_slower_takes_four_pairs_and_the_truth_is_inside() -> None:
    found = measure(noisy(0.5, 0.02), Recipe.of(TimingBench()), ticking(0.0))
    assert (found.stopped, found.n) == ("slower", 4)
    assert found.interval.lo < 0.5 < found.interval.hi < 0.8
    assert measure(noisy(0.5, 0.02), Recipe.of(TimingBench(), enough_below=0.0), ticking(0.0)).n > 4


@pytest.mark.parametrize(("speedup", "noise"), [(0.81, 0.01), (0.5, 0.5), (2.0, 0.01), (1.0, 0.02)])
def test_what_is_not_clearly_slower_is_measured_on(speedup: float, noise: float) -> None:
    for seed in range(50):
        found = measure(noisy(speedup, noise, seed), Recipe.of(TimingBench()), ticking(0.0))
        assert found.stopped != "slower" or found.interval.hi < 0.8
        assert found.n > 4 or noise == 0.5


def test_stopping_early_for_the_slow_keeps_the_truth_inside() -> None:
    misses = 0
    for seed in range(400):
        found = measure(noisy(0.6, 0.05, seed), Recipe.of(TimingBench(), placement=0.0), ticking(0.0))
        misses += not found.interval.lo <= 0.6 <= found.interval.hi
    assert misses <= 0.02 * 400 + 4


def on_a_gpu(**more: Any) -> Recipe:
    return Recipe.of(TimingBench(), warmup=0, looks=3, few=(2, 3, 4), enough_above=1.3, **more)


@pytest.mark.parametrize(("candidate_ms", "speedup", "pairs"), [(6.0, 0.3, 1), (4.0, 0.3, 2), (6.0, 0.6, 2)])
def test_one_pair_of_long_calls_tells_that_a_kernel_is_slower(candidate_ms: float, speedup: float, pairs: int) -> None:
    """With an interval by assumption, and only where that leaves no doubt."""
    calls = itertools.repeat(Pair(1e6 * candidate_ms * speedup, 1e6 * candidate_ms))
    found = measure(calls.__next__, on_a_gpu(lone_ms=5.0, placement=0.0), ticking(0.0))
    assert (found.stopped, found.n) == ("slower", pairs)
    lo, hi = found.interval.lo / found.interval.median, found.interval.hi / found.interval.median
    assert (lo, hi) == pytest.approx((1 / 1.5, 1.5) if pairs == 1 else (1.0, 1.0))


def test_a_lone_pair_that_was_disturbed_tells_nothing() -> None:
    calls = iter([Pair(1e6, 1e7, polluted=True), *[Pair(1e6, 1e7)] * 9])
    found = measure(calls.__next__, on_a_gpu(lone_ms=5.0, placement=0.0), ticking(0.0))
    assert (found.n, found.rejected, found.interval.hi) == (2, 1, pytest.approx(0.1))


@pytest.mark.parametrize(("speedup", "stopped"), [(0.3, "slower"), (2.5, "faster")])
def test_where_pairs_hardly_scatter_two_or_three_tell_what_is_clear(speedup: float, stopped: str) -> None:
    found = [measure(noisy(speedup, 0.002, seed), on_a_gpu(), ticking(0.0)) for seed in range(100)]
    assert all(m.stopped == stopped and m.interval.lo < speedup < m.interval.hi for m in found)
    assert sum(m.n for m in found) <= 3 * len(found)
    assert all(m.interval.half_width < 0.15 for m in found if stopped == "faster")


@pytest.mark.parametrize(("speedup", "noise"), [(1.25, 0.005), (0.9, 0.005), (2.0, 0.1)])
def test_what_is_not_clearly_faster_is_measured_on(speedup: float, noise: float) -> None:
    for seed in range(50):
        found = measure(noisy(speedup, noise, seed), on_a_gpu(), ticking(0.0))
        assert found.n > 4 or (found.interval.lo > 1.3 and noise == 0.1)


@pytest.mark.parametrize("speedup", [0.4, 0.75, 1.5, 3.0])
def test_a_few_pairs_keep_the_truth_inside(speedup: float) -> None:
    found = [measure(noisy(speedup, 0.01, seed), on_a_gpu(placement=0.0), ticking(0.0)) for seed in range(500)]
    misses = sum(not m.interval.lo <= speedup <= m.interval.hi for m in found)
    assert misses <= 0.02 * len(found)


def test_a_noisy_measurement_ends_at_the_cap_of_pairs() -> None:
    found = measure(noisy(1.0, 0.5), Recipe.of(TimingBench()), ticking(0.0))
    assert (found.stopped, found.n) == ("cap", 30)


def test_a_slow_measurement_ends_at_the_cap_of_time_but_not_below_the_minimum() -> None:
    found = measure(noisy(1.0, 0.5), Recipe.of(TimingBench()), ticking(0.04))
    assert (found.stopped, found.n) == ("cap", TimingBench().min_pairs)


def test_a_very_slow_measurement_does_not_wait_for_the_minimum_but_for_two() -> None:
    assert measure(noisy(1.0, 0.5), Recipe.of(TimingBench()), ticking(0.2)).n < 6
    assert measure(noisy(1.0, 0.5), Recipe.of(TimingBench()), ticking(100.0)).n == 2


def test_two_pairs_that_agree_by_chance_claim_nothing() -> None:
    pairs = itertools.cycle([Pair(1010.0, 1000.0), Pair(1014.0, 1000.0)])
    found = measure(lambda: next(pairs), Recipe.of(TimingBench(), placement=0.0), ticking(100.0))
    assert found.interval.lo < 1 < found.interval.hi


@pytest.mark.parametrize(
    ("recipe", "thrown_away"),
    [
        (Recipe.of(TimingBench(), warmup=3), 3),
        (Recipe.of(TimingBench(), warmup=3, warmup_s=0.02), 10),
        (Recipe.of(TimingBench(cap_s=0.1), warmup_s=9.0), 25),
    ],
)
def test_warming_up_goes_by_count_and_by_time_and_leaves_half_of_the_cap(recipe: Recipe, thrown_away: int) -> None:
    count = itertools.count()

    def sample() -> Pair:
        next(count)
        return Pair(2000.0, 1000.0)

    kept = measure(sample, recipe, ticking(0.001)).n
    assert abs(next(count) - kept - thrown_away) <= 1  # the clock is read twice for each


def test_polluted_pairs_are_left_out_and_counted() -> None:
    good = noisy(2.0, 0.001)
    turns = itertools.cycle([True, True, False])
    found = measure(
        lambda: good() if next(turns) else Pair(9e9, 1.0, 0.9, True), Recipe.of(TimingBench()), ticking(0.0)
    )
    assert found.interval.hi < 2.1
    assert found.rejected > 0
    assert found.load > 0.2


def test_a_core_that_is_never_quiet_still_gives_a_result_with_its_load() -> None:
    found = measure(lambda: Pair(2.0, 1.0, 0.9, True), Recipe.of(TimingBench()), ticking(0.0))
    assert found.stopped == "disturbed"
    assert found.load == pytest.approx(0.9)


def test_a_core_that_others_mostly_had_claims_no_speedup() -> None:
    turns = itertools.cycle([Pair(2.0, 1.0), Pair(2.0, 1.0, 0.9, True), Pair(2.0, 1.0, 0.9, True)])
    found = measure(lambda: next(turns), Recipe.of(TimingBench()), ticking(0.0))
    assert (found.interval.median, found.interval.lo) == (2.0, 1.0)


Noise = Callable[[random.Random], Callable[[], float]]


def heavy(rng: random.Random) -> Callable[[], float]:
    return lambda: math.exp(max(-3.0, min(3.0, 0.03 * rng.gauss(0, 1) / math.sqrt(rng.expovariate(1) + 1e-3))))


def bimodal(rng: random.Random) -> Callable[[], float]:
    return lambda: (1.25 if rng.random() < 0.5 else 1.0) * rng.lognormvariate(0, 0.01)


def drifting(rng: random.Random) -> Callable[[], float]:
    steps = itertools.accumulate(rng.gauss(0, 0.02) for _ in itertools.count())
    return lambda: math.exp(next(steps)) * rng.lognormvariate(0, 0.01)


def switching(rng: random.Random) -> Callable[[], float]:
    states = itertools.accumulate((rng.random() < 0.05 for _ in itertools.count()), lambda a, b: a ^ b)
    return lambda: (1.3 if next(states) else 1.0) * rng.lognormvariate(0, 0.02)


def in_random_order(noise: Noise, speedup: float, seed: int) -> Callable[[], Pair]:
    """Pairs as a bench takes them: one call after the other through the same noise, in an order that is drawn."""
    rng = random.Random(seed)
    time_of = noise(rng)

    def sample() -> Pair:
        first, second = 1e5 * time_of(), 1e5 * time_of()
        reference, candidate = (first, second) if rng.random() < 0.5 else (second, first)
        return Pair(reference * speedup, candidate)

    return sample


EXACT = Recipe.of(TimingBench(), placement=0.0)
"""Nothing widens the interval: the statistics alone must hold."""


@pytest.mark.parametrize("noise", [heavy, bimodal, drifting, switching])
def test_a_speedup_that_is_not_there_is_claimed_in_at_most_one_percent_whatever_the_noise(noise: Noise) -> None:
    runs = 1000
    wins = sum(measure(in_random_order(noise, 1.0, s), EXACT, ticking(0.0)).interval.lo > 1 for s in range(runs))
    assert wins <= 0.01 * runs


@pytest.mark.parametrize("noise", [heavy, bimodal, drifting, switching])
def test_a_few_pairs_of_equal_kernels_never_seem_clearly_faster(noise: Noise) -> None:
    short = msgspec.structs.replace(on_a_gpu(placement=0.0), max_pairs=8)
    found = [measure(in_random_order(noise, 1.0, seed), short, ticking(0.0)) for seed in range(300)]
    assert not [m for m in found if m.stopped == "faster"]


@pytest.mark.parametrize("noise", [heavy, bimodal, drifting, switching])
def test_a_known_slowdown_lies_in_its_interval(noise: Noise) -> None:
    truths = [1 / 1.005, 1 / 1.01, 1 / 1.02, 1 / 1.05, 1 / 1.2]
    found = [(t, measure(in_random_order(noise, t, s), EXACT, ticking(0.0))) for s, t in enumerate(truths * 80)]
    hits = sum(m.interval.lo <= t <= m.interval.hi for t, m in found)
    assert hits / len(found) >= 0.94


def test_a_clear_speedup_is_found() -> None:
    found = [measure(in_random_order(heavy, 1.5, seed), Recipe.of(TimingBench()), ticking(0.0)) for seed in range(100)]
    assert all(m.interval.lo > 1.2 for m in found)


@pytest.mark.parametrize(("ms", "share"), [(0.001, 0.5), (0.01, 0.05), (0.1, 0.03), (1.0, 0.01), (50.0, 0.01)])
def test_the_benchs_resolution_is_a_share_by_length(ms: float, share: float) -> None:
    points = (Point(1.0, 0.01), Point(0.01, 0.05))
    assert share_at(ms, points, 0.2) == pytest.approx(share)


def test_a_bench_that_was_never_tested_against_itself_uses_a_fixed_share() -> None:
    assert share_at(1.0, (), 0.2) == 0.2


def test_the_interval_is_widened_by_what_the_bench_can_not_tell_apart() -> None:
    exact = measure(noisy(1.03, 0.001), Recipe.of(TimingBench(), placement=0.0), ticking(0.0))
    wide = measure(noisy(1.03, 0.001), Recipe.of(TimingBench(), resolved=(Point(1e-3, 0.05),)), ticking(0.0))
    assert exact.interval.lo > 1.02
    assert wide.interval.lo < 1
    assert wide.share == pytest.approx(0.05, rel=0.1)


def test_a_difference_below_the_resolution_is_never_called_decided() -> None:
    recipe = Recipe.of(TimingBench(), placement=0.1, resolution=0.004)
    assert measure(noisy(1.08, 0.01), recipe, ticking(0.0)).stopped == "cap"
    assert measure(noisy(1.3, 0.01), recipe, ticking(0.0)).stopped == "decided"


def test_the_host_says_what_it_is() -> None:
    assert "×" in hardware()
    assert l2_bytes() >= 1 << 16
    CacheFlush(1 << 16)()


def test_core_use_of_an_unknown_process_is_our_own() -> None:
    use = CoreUse(4_000_000)
    first, second = use(), use()
    use.close()
    assert second[1] >= first[1]


@pytest.mark.parametrize(
    ("waited", "used", "taken"), [(900, 950, 50), (0, 100, 0), (900, 100, 900), (2000, 100, 900), (500, 1100, 0)]
)
def test_what_others_took_is_neither_our_sleep_nor_our_own_turn(waited: int, used: int, taken: int) -> None:
    assert taken_by_others(1000, waited, used) == taken


def test_pinning_is_undone() -> None:
    import os

    before = os.sched_getaffinity(0)
    with pinned((min(before),)):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
