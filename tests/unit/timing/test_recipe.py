"""The recipe with a sampler and a clock of our own: nothing here measures anything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from kbrl_async.timing import Pair, Recipe, measure
from kbrl_async.timing.host import CoreUse, Flush, hardware, l2_bytes, pinned, taken_by_others


def ticking(step: float) -> Callable[[], float]:
    counter = itertools.count()
    return lambda: next(counter) * step


def noisy(speedup: float, noise: float, seed: int = 0) -> Callable[[], Pair]:
    rng = random.Random(seed)
    return lambda: Pair(1000 * speedup * rng.lognormvariate(0, noise), 1000 * rng.lognormvariate(0, noise))


def test_a_quiet_measurement_is_resolved_early() -> None:
    found = measure(noisy(2.0, 0.001), Recipe(), ticking(0.0))
    assert (found.stopped, found.n) == ("resolved", 6)
    assert found.interval.median == pytest.approx(2.0, rel=0.01)


def test_a_noisy_measurement_ends_at_the_cap_of_pairs() -> None:
    found = measure(noisy(1.0, 0.5), Recipe(), ticking(0.0))
    assert (found.stopped, found.n) == ("cap", 30)


def test_a_slow_measurement_ends_at_the_cap_of_time_but_not_below_the_minimum() -> None:
    found = measure(noisy(1.0, 0.5), Recipe(), ticking(0.1))
    assert (found.stopped, found.n) == ("cap", 6)


def test_a_very_slow_measurement_does_not_wait_for_the_minimum() -> None:
    assert measure(noisy(1.0, 0.5), Recipe(), ticking(1.0)).n < 6


def test_polluted_pairs_are_left_out_and_counted() -> None:
    good = noisy(2.0, 0.001)
    turns = itertools.cycle([True, False])
    found = measure(lambda: good() if next(turns) else Pair(9e9, 1.0, 0.9, True), Recipe(), ticking(0.0))
    assert found.interval.hi < 2.1
    assert found.rejected > 0
    assert found.load > 0.2


def test_a_core_that_is_never_quiet_still_gives_a_result_with_its_load() -> None:
    found = measure(lambda: Pair(2.0, 1.0, 0.9, True), Recipe(), ticking(0.0))
    assert found.stopped == "cap"
    assert found.load == pytest.approx(0.9)


def test_the_same_code_is_seldom_called_faster_despite_several_looks() -> None:
    wins = sum(measure(noisy(1.0, 0.1, seed), Recipe(), ticking(0.0)).interval.lo > 1 for seed in range(400))
    assert wins / 400 < 0.05


def test_the_host_says_what_it_is() -> None:
    assert "×" in hardware()
    assert l2_bytes() >= 1 << 16
    Flush(1 << 16)()


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
