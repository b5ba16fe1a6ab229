"""What is clearly slower than its reference need not see all sets, and what that lets nobody do."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.verify import Bench, checks
from kbrl_async.kernels.verify.checks import Checker, checked_slots
from kbrl_async.kernels.verify.cpu import bursts
from kbrl_async.kernels.verify.inputs import KINDS, STRATA, in_secret_order
from protocols.records import DISTURBED, REPLAYED, SPARED_SETS, BenchReport, Candidate, Fault, Problem, Timing
from tests.candidates import affine, elementwise

PROBLEM = Problem("L1/01_affine", 1, "affine", affine())
GROUPS = itertools.count()
RIGHT = elementwise("2 * x[i] + 1")
SLOWER = Timing(4, 0.01, 0.009, 0.011, 1.0, 1.0)
Judge = Callable[..., tuple[BenchReport, list[str]]]


@pytest.fixture
def judge(bench: Bench, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A report, and what is said of its sets, of a kernel that takes long whatever this host does, where a measurement
    finds `timed`; None: where there is one.
    """
    monkeypatch.setattr(checks, "_SLOW", 0.0)

    def run(
        source: str, timed: Timing | None = SLOWER, timing: bool = True, **more: Any
    ) -> tuple[BenchReport, list[str]]:
        group = more.pop("group", f"g{next(GROUPS)}")
        if timed is not None:
            monkeypatch.setattr(Bench, "measure", lambda *_: timed)
        monkeypatch.setattr(bench, "options", msgspec.structs.replace(bench.options, **{"check_s": 1e-9, **more}))
        chosen = Candidate(source, "c")
        paths = artifact_paths(builder.store, builder.build(chosen, PROBLEM))
        found = bench.evaluate(PROBLEM, chosen, paths, timing=timing, group=group)
        said = [stage.detail.partition(";")[0] for stage in found.stages if stage.name == "full_inputs"]
        return found, said

    return run


def test_the_place_that_may_be_timed_alone_is_always_among_those_that_are_checked() -> None:
    chosen = [checked_slots(16, 3, random.Random(seed)) for seed in range(200)]
    assert all(0 in slots and len(set(slots)) == 3 for slots in chosen)
    assert {slots.index(0) for slots in chosen} == {0, 1, 2}
    assert len({slot for slots in chosen for slot in slots}) == 16
    assert checked_slots(1, 3, random.Random(1)) == [0]


def test_a_slow_kernel_sees_a_set_of_each_kind_and_a_fast_one_all(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = judge(RIGHT)
    assert (found.verdict.fault, found.verdict.trust, found.verdict.passed) == (Fault.OK, REPLAYED, 3)
    assert said == ["3 of 3 secret input sets, 7 more are for faster kernels"]
    monkeypatch.setattr(checks, "_SLOW", math.inf)
    assert judge(RIGHT)[1] == ["10 of 10 secret input sets"]


@pytest.mark.parametrize(
    ("calls", "reference", "is_so"),
    [((0.01, 0.02), 0.004, True), ((0.001, 0.05), 0.004, False), ((0.004,), 1e-3, False)],
)
def test_long_is_what_each_call_and_all_together_are(calls: tuple[float, ...], reference: float, is_so: bool) -> None:
    """So a kernel that is slow now and then, or short in all, sees all sets."""
    checker = cast(Any, Checker.__new__(Checker))
    checker._calls_s, checker.reference = list(calls), SimpleNamespace(reference_s=reference)
    checker.options = SimpleNamespace(check_s=0.02)
    assert checker._has_taken_long == is_so


@pytest.mark.parametrize("timed", [{"hi": 0.9}, {"stopped": DISTURBED}, {"lo": 1.5, "hi": 1.7, "speedup": 1.6}])
def test_who_is_slow_when_checked_and_not_when_timed_sees_all_sets_after_all(judge: Judge, timed: Any) -> None:
    found, said = judge(RIGHT, msgspec.structs.replace(SLOWER, **timed))
    assert said[-1] == "10 of 10 secret input sets"
    assert found.verdict.passed == found.verdict.total == 10


@pytest.mark.parametrize("forwards", [2, 16])
def test_what_a_measurement_leaves_in_its_process_is_not_held_against_it(
    judge: Judge, bench: Bench, monkeypatch: pytest.MonkeyPatch, forwards: int
) -> None:
    """By then the last checked output is long freed, and its process may have had fewer or more places for inputs."""
    monkeypatch.setattr(bursts, "forwards", lambda *given: forwards)
    found, said = judge(RIGHT, None, recipe=msgspec.structs.replace(bench.options.recipe, enough_below=0.0))
    assert (found.verdict.fault, said[-1]) == (Fault.OK, "10 of 10 secret input sets"), found.verdict
    assert found.timing is not None


def test_what_is_timed_once_more_in_a_fresh_process_sees_there_what_it_was_spared(judge: Judge, bench: Bench) -> None:
    suspicious = msgspec.structs.replace(bench.options.recipe, enough_below=0.0, suspicious=0.0, cap_s=0.05)
    found, said = judge(RIGHT, None, recipe=suspicious)
    assert (found.verdict.fault, said[-1]) == (Fault.OK, "10 of 10 secret input sets"), found.verdict
    wrong = [judge(elementwise("(x[i] > 12 ? 0 : 2 * x[i] + 1)"), None, recipe=suspicious)[0] for _ in range(2)]
    assert {report.verdict.fault for report in wrong} == {Fault.INCORRECT}


@pytest.mark.parametrize(("which", "sets"), [("run", 3), ("finish", 7)])
def test_a_long_wait_before_its_sets_is_no_time_of_its_own(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, which: str, sets: int
) -> None:
    """Its processes may start late, and others have the device for longer than a candidate may take."""
    step, left = getattr(Checker, which), list[float]()

    def late(self: Checker, tick: Callable[[], None]) -> None:
        self._began -= 1e4
        self._deadline -= 1e4
        step(self, lambda: left.append(self.call_deadline()))

    monkeypatch.setattr(Checker, which, late)
    assert judge(RIGHT, msgspec.structs.replace(SLOWER, hi=0.9))[0].verdict.fault is Fault.OK
    assert len(left) == sets
    assert min(left) > 0.1, "not the least that any call has"


def test_what_it_was_spared_can_still_refuse_it(judge: Judge) -> None:
    """Wrong on large inputs only, which most tries have not seen when they are timed."""
    source = elementwise("(x[i] > 12 ? 0 : 2 * x[i] + 1)")
    found = [judge(source, msgspec.structs.replace(SLOWER, hi=0.9)) for _ in range(4)]
    assert {report.verdict.fault for report, _ in found} == {Fault.INCORRECT}


@pytest.mark.parametrize("more", [{"group": ""}, {"timing": False}, {"check_s": 0.0}, {"replay": False}])
def test_all_sets_are_for_evaluations_untimed_and_watched_kernels_and_whoever_asks(judge: Judge, more: Any) -> None:
    assert judge(RIGHT, **more)[1] == ["10 of 10 secret input sets"]


def test_what_is_wrong_and_slow_is_wrong_after_three_sets(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where wrong kernels are replayed, too."""
    monkeypatch.setattr(Checker, "is_replayed", property(lambda self: True))
    found, _ = judge(elementwise("2 * x[i]"))
    assert (found.verdict.fault, found.verdict.passed, found.verdict.total) == (Fault.INCORRECT, 0, 3)


def test_nobody_knows_which_sets_come_first() -> None:
    names = [kind.name for kind in KINDS]
    orders = [in_secret_order(names, random.Random(seed)) for seed in range(300)]
    assert all(sorted(order) == list(range(len(names))) for order in orders)
    firsts = [[names[place] for place in order[:3]] for order in orders]
    assert len(STRATA) == SPARED_SETS
    assert all(len(set(first) & set(stratum)) == 1 for first in firsts for stratum in STRATA)
    assert {name for first in firsts for name in first} == {name for stratum in STRATA for name in stratum}
    assert len({tuple(next(n for n, s in enumerate(STRATA) if name in s) for name in first) for first in firsts}) == 6


def test_where_kinds_are_missing_others_take_their_place() -> None:
    assert sorted(in_secret_order(["nominal"] * 4 + ["mixed"], random.Random(2))) == [0, 1, 2, 3, 4]
