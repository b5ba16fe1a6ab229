"""The funnel's counters: who came to a step, who passed it, and what it cost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.rollouts.rewards.presets import STAGE3
from kbrl_async.rollouts.scoring import score
from kbrl_async.rollouts.stats import RolloutStats, StepOutcome, steps_of
from kbrl_async.runs.archive.funnel import funnel, way
from kbrl_async.runs.archive.rows import make_row
from protocols.records import (
    VERIFIER,
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    StageReport,
    Timing,
    Verdict,
)
from protocols.rollout import STEPS, Record
from tests.records import turn

BUILT = BuildReport(Fault.OK, stages=(StageReport("static", Fault.OK, 0.01), StageReport("compile", Fault.OK, 0.2)))


def written(source: str | None) -> Generation:
    fault = Fault.OK if source else Fault.FORMAT_ERROR
    return Generation(0, [], [], [], "", "stop", Candidate(source, "c") if source else None, fault)


def benched(fault: Fault, **stages: Fault) -> BenchReport:
    """A bench's report with these stages, half a second each."""
    timing = Timing(9, 1.5, 1.4, 1.6, 2.0, 3.0) if fault is Fault.OK and "timing" in stages else None
    reports = tuple(StageReport(name, each, 0.5) for name, each in {"reference": Fault.OK, **stages}.items())
    return BenchReport(Verdict(fault, 1, 4), timing, stages=reports)


WRONG = benched(Fault.INCORRECT, small_inputs=Fault.INCORRECT, full_inputs=Fault.INCORRECT)


def counted(*records: Record) -> dict[str, tuple[float, float]]:
    """(entered, passed) by step."""
    found = funnel([stats_of(record) for record in records])
    return {name: (step["entered"], step["passed"]) for name, step in found.items()}


def stats_of(record: Record) -> RolloutStats:
    scored = score(record, STAGE3)
    assert scored is not None
    return scored.stats


def test_steps_are_those_of_the_record_without_what_is_not_the_candidates() -> None:
    names = [(step.name, step.passed) for step in steps_of(turn(written("x"), BUILT, WRONG))]
    assert names == [
        ("format", True), ("static", True), ("compile", True), ("small_inputs", False), ("full_inputs", False),
    ]  # fmt: skip


def test_an_answer_without_code_ends_at_its_format() -> None:
    assert steps_of(turn(written(None))) == (StepOutcome("format", False),)


def test_who_fails_the_small_inputs_is_not_counted_again_at_the_full_ones_but_costs_what_they_cost() -> None:
    found = funnel([stats_of(turn(written("x"), BUILT, WRONG)), stats_of(turn(written(None)))])
    assert {name: (step["entered"], step["passed"]) for name, step in found.items()} == {
        "format": (2, 1),
        "static": (1, 1),
        "compile": (1, 1),
        "small_inputs": (1, 0),
    }
    assert found["compile"]["median_s"] == 0.2
    assert found["small_inputs"]["seconds"] == 1.0


@pytest.mark.parametrize(
    ("report", "left"),
    [
        (benched(Fault.RUNTIME_ERROR), "small_inputs"),
        (benched(Fault.TIMEOUT, small_inputs=Fault.OK), "full_inputs"),
        (benched(Fault.CHEATING, small_inputs=Fault.OK, full_inputs=Fault.OK), "full_inputs"),
        (benched(Fault.CHEATING, small_inputs=Fault.OK, full_inputs=Fault.OK, timing=Fault.OK), "timing"),
        (benched(Fault.INCORRECT, small_inputs=Fault.OK, full_inputs=Fault.OK, timing=Fault.INCORRECT), "timing"),
    ],
    ids=["crashed before the first set", "crashed later", "proof of launches", "checked after timing", "while timed"],
)
def test_a_fault_beside_the_steps_is_one_step_s(report: BenchReport, left: str) -> None:
    record = turn(written("x"), BUILT, report)
    steps = way(steps_of(record), record.fault)
    assert (steps[-1].name, steps[-1].passed) == (left, False)
    assert all(step.passed for step in steps[:-1])
    assert make_row("t", record, at=0.0).step == left


def test_an_answer_that_is_no_python_fails_the_static_check_though_its_fault_is_the_format_s() -> None:
    no_python = BuildReport(
        Fault.FORMAT_ERROR, rule="syntax", stages=(StageReport("static", Fault.FORMAT_ERROR, 0.01),)
    )
    assert counted(turn(written("x"), no_python)) == {"format": (1, 1), "static": (1, 0)}
    assert stats_of(turn(written("x"), no_python)).format


def test_a_run_that_times_nothing_has_no_step_for_it() -> None:
    right = benched(Fault.OK, small_inputs=Fault.OK, full_inputs=Fault.OK)
    assert list(counted(turn(written("x"), BUILT, right))) == list(STEPS[:-1])


def test_who_cheats_has_compiled() -> None:
    caught = turn(written("x"), BUILT, benched(Fault.CHEATING, small_inputs=Fault.CHEATING))
    stats = stats_of(caught)
    assert (stats.format, stats.compiled, stats.correct, stats.cheated) == (True, True, False, True)
    assert counted(caught)["compile"] == (1, 1)


def test_a_prediction_is_no_candidate() -> None:
    guess = RolloutStats(problem_id="L1/a", level=1, reward=1.0, role=VERIFIER, funnel=(StepOutcome("format", False),))
    assert funnel([guess]) == {}


OWN = [Fault.INCORRECT, Fault.RUNTIME_ERROR, Fault.TIMEOUT, Fault.CHEATING, Fault.ILLEGAL_ACCESS]


@st.composite
def records(draw: Any) -> Record:
    """Any way that a candidate can take, reports of stages missing or doubled where a bench may leave them out."""
    end = draw(st.sampled_from(["format", "static", "compile", "bench", "right"]))
    if end == "format":
        return turn(written(None))
    if end in ("static", "compile"):
        faults = [Fault.STATIC_VIOLATION, Fault.FORMAT_ERROR] if end == "static" else [Fault.COMPILE_ERROR]
        fault = draw(st.sampled_from(faults))
        stages = BUILT.stages[:1] if end == "compile" else ()
        return turn(written("x"), BuildReport(fault, stages=(*stages, StageReport(end, fault, 0.1))))
    if end == "right":
        names = STEPS[3:]
        return turn(written("x"), BUILT, benched(Fault.OK, **dict.fromkeys(names, Fault.OK)))
    fault = draw(st.sampled_from(OWN))
    count = draw(st.integers(0, 3))
    came_to = {name: draw(st.sampled_from([Fault.OK, fault])) for name in STEPS[3 : 3 + count]}
    return turn(written("x"), BUILT, benched(fault, **came_to))


@given(st.lists(records(), min_size=1, max_size=30))
def test_as_many_enter_a_step_as_passed_the_one_before(listed: list[Record]) -> None:
    stats = [stats_of(record) for record in listed]
    steps = funnel(stats)
    assert steps["format"]["entered"] == len(stats)
    came_to = [name for name in STEPS if name in steps]
    assert came_to == list(STEPS[: len(came_to)])
    for before, after in itertools.pairwise(came_to):
        assert steps[after]["entered"] == steps[before]["passed"]
    failed = {name: step["entered"] - step["passed"] for name, step in steps.items()}
    assert sum(failed.values()) == sum(not each.correct for each in stats)
    assert steps["format"]["passed"] == sum(each.format for each in stats)
    assert steps.get("compile", {"passed": 0})["passed"] == sum(each.compiled for each in stats)
    assert sum(step["seconds"] for step in steps.values()) == pytest.approx(
        sum(step.seconds for each in stats for step in each.funnel)
    )
