"""Other load, read from a /proc that the test writes itself."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async.kernels.timing.load import CpuCounters, HostLoad, LoadWatch, between, snapshot, wait_until_quiet

TICK = os.sysconf("SC_CLK_TCK")


def write_proc(
    root: Path, *, busy_s: float = 0, steal_s: float = 0, waiting_s: float = 0, pressure_s: float = 0
) -> Path:
    (root / "pressure").mkdir(exist_ok=True)
    core0 = "cpu0 900 0 0 0 0 0 0 900 0 0"
    core1 = f"cpu1 {int(busy_s * TICK)} 0 0 77 0 0 0 {int(steal_s * TICK)} 0 0"
    (root / "stat").write_text(f"cpu 1 2 3 4 5 6 7 8 9 0\n{core0}\n{core1}\nintr 1 2 3\n")
    (root / "schedstat").write_text(
        f"version 17\ntimestamp 1\ncpu0 0 0 0 0 0 0 5 7000000000 9\ncpu1 0 0 0 0 0 0 5 {int(waiting_s * 1e9)} 9\n"
    )
    (root / "pressure" / "cpu").write_text(f"some avg10=0.00 total={int(pressure_s * 1e6)}\nfull avg10=0.00 total=5\n")
    (root / "loadavg").write_text("0.5 0.4 0.3 3/120 4711\n")
    return root


def looking(root: Path, at: float, own_s: float = 0.0) -> CpuCounters:
    return snapshot((1,), proc=root, own_s=lambda: own_s, clock=lambda: at)


def test_what_others_and_the_hypervisor_took_of_our_core_is_a_share(tmp_path: Path) -> None:
    before = looking(write_proc(tmp_path, busy_s=10, steal_s=1), 100.0)
    after = looking(write_proc(tmp_path, busy_s=12, steal_s=1.5), 104.0, own_s=1.0)
    load = between(before, after)
    assert (load.others, load.steal) == (pytest.approx(0.25), pytest.approx(0.125))
    assert load.share == pytest.approx(0.375)


def test_waiting_and_pressure_are_read_for_our_core_and_the_host(tmp_path: Path) -> None:
    before = looking(write_proc(tmp_path, waiting_s=1, pressure_s=5), 0.0)
    load = between(before, looking(write_proc(tmp_path, waiting_s=2, pressure_s=6), 10.0))
    assert (load.waiting, load.pressure, load.runnable) == (pytest.approx(0.1), pytest.approx(0.1), 3)


def test_a_host_that_says_nothing_is_unknown_and_not_in_the_way(tmp_path: Path) -> None:
    load = between(looking(tmp_path, 0.0), looking(tmp_path, 1.0))
    assert load == HostLoad(1.0)
    assert load.share is None
    assert load.is_quiet(0.0)


def test_a_core_that_is_full_of_waiters_is_not_quiet() -> None:
    assert not HostLoad(1.0, others=0.0, waiting=0.5).is_quiet(0.1)


def busy_until(quiet_from: float) -> Callable[[], CpuCounters]:
    """A core that others use fully up to a time; each look is 50 ms later."""
    counter = itertools.count()

    def look() -> CpuCounters:
        at = next(counter) * 0.05
        return CpuCounters(at, busy_s=min(at, quiet_from), steal_s=0.0)

    return look


def test_load_is_waited_out() -> None:
    slept: list[float] = []
    load, waited = wait_until_quiet(busy_until(0.3), sleep=slept.append)
    assert load.share == pytest.approx(0.0)
    assert waited == pytest.approx(0.35)
    assert sum(slept) == pytest.approx(0.35)


def test_waiting_ends_on_a_host_that_is_never_quiet_and_the_load_is_told() -> None:
    load, waited = wait_until_quiet(busy_until(99.0), patience_s=0.2, sleep=lambda _: None)
    assert load.share == pytest.approx(1.0)
    assert waited == pytest.approx(0.2)


def test_this_host_can_be_looked_at() -> None:
    first = snapshot()
    assert between(first, snapshot()).seconds > 0


def test_a_disturbed_pair_waits_until_the_core_is_ours_again_and_only_so_long_in_all() -> None:
    slept: list[float] = []
    watch = LoadWatch(busy_until(99.0), patience_s=0.2, sleep=slept.append)
    watch.pair(False)
    assert slept == []
    for _ in range(10):
        watch.pair(True)
    assert 0.2 <= watch.waited_s < 0.3
    assert watch.load().share == pytest.approx(1.0)


def test_waiting_is_not_charged_to_the_measurement() -> None:
    watch = LoadWatch(busy_until(0.1), patience_s=9.0, sleep=lambda _: None)
    watch.pair(True)
    assert watch.waited_s > 0.05
    assert watch.clock() < time.monotonic()
