"""A verified candidate is worth what a rollout with the same end earns."""

from __future__ import annotations

import pytest

from kbrl_async.errors import UserError
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.rollouts.rewards.results import record_of, reward
from protocols.records import OBSERVED, REPLAYED, Fault, StageReport, Timing, Verdict


def result(fault: Fault, *stages: str, timing: Timing | None = None, passed: int = 0, trust: str = "") -> Result:
    reports = tuple(StageReport(name, fault if name == stages[-1] else Fault.OK, 0.1) for name in stages)
    return Result("L1/1", "c", "cpu", Verdict(fault, passed, 10, trust=trust), reports, timing)


TWICE = Timing(9, 2.1, 2.0, 2.2, 1.0, 2.1)
RIGHT = ("format", "static", "compile", "small_inputs", "full_inputs", "timing")


@pytest.mark.parametrize(
    ("found", "worth"),
    [
        (result(Fault.FORMAT_ERROR, "format"), 0.0),
        (result(Fault.STATIC_VIOLATION, "format", "static"), 0.05),
        (result(Fault.COMPILE_ERROR, "format", "static", "compile"), 0.05),
        (result(Fault.INCORRECT, *RIGHT[:-1], passed=5), 0.15 + 0.25),
        (result(Fault.TIMEOUT, *RIGHT[:-1], passed=10), 0.15 + 0.45),
        (result(Fault.CHEATING, *RIGHT[:-1], passed=10), 0.0),
        (result(Fault.OK, *RIGHT, passed=10, timing=TWICE, trust=REPLAYED), 0.65 + 0.35 * 2 / 3),
        (result(Fault.OK, *RIGHT, passed=10, timing=TWICE, trust=OBSERVED), 0.65 + 0.35 / 2),
    ],
)
def test_each_stage_that_was_passed_pays(found: Result, worth: float) -> None:
    assert reward(found) == pytest.approx(worth)
    assert record_of(found).fault is found.fault


def test_a_preset_is_named_and_one_that_changes_is_refused() -> None:
    assert reward(result(Fault.OK, *RIGHT, passed=10, timing=TWICE), "correct") == 1.0
    with pytest.raises(UserError, match="auto changes while a run goes on"):
        reward(result(Fault.OK, *RIGHT), "auto")
    with pytest.raises(UserError, match="none of the reward presets is called 'stage33'"):
        reward(result(Fault.OK, *RIGHT), "stage33")


def test_own_parts_see_the_text() -> None:
    record = record_of(result(Fault.OK, *RIGHT), source="class ModelNew: ...", response="<think>so</think>")
    assert record.source == "class ModelNew: ..."
    assert record.generation is not None
    assert record.generation.text == "<think>so</think>"
