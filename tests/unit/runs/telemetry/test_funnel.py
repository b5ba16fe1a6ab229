"""The funnel's counters: who came to a step, who passed it, and what it cost."""

from __future__ import annotations

from kbrl_async.rollouts.stats import Step, steps_of
from kbrl_async.runs.archive.funnel import funnel
from protocols.records import BenchReport, BuildReport, Candidate, Fault, Generation, StageReport, Verdict
from tests.records import turn

BUILT = BuildReport(Fault.OK, stages=(StageReport("static", Fault.OK, 0.01), StageReport("compile", Fault.OK, 0.2)))
BENCHED = BenchReport(
    Verdict(Fault.INCORRECT),
    stages=(StageReport("reference", Fault.OK, 0.5), StageReport("small_inputs", Fault.INCORRECT, 0.1)),
)


def written(source: str | None) -> Generation:
    return Generation(0, [], [], [], "", "stop", Candidate(source, "c") if source else None)


def test_steps_are_those_of_the_record_without_what_is_not_the_candidates() -> None:
    names = [(step.name, step.passed) for step in steps_of(turn(written("x"), BUILT, BENCHED))]
    assert names == [("format", True), ("static", True), ("compile", True), ("small_inputs", False)]


def test_an_answer_without_code_ends_at_its_format() -> None:
    assert steps_of(turn(written(None))) == (Step("format", False),)


def test_each_step_counts_who_came_and_who_passed() -> None:
    found = funnel([steps_of(turn(written("x"), BUILT, BENCHED)), steps_of(turn(written(None)))])
    assert {name: (step["entered"], step["passed"]) for name, step in found.items()} == {
        "format": (2, 1),
        "static": (1, 1),
        "compile": (1, 1),
        "small_inputs": (1, 0),
    }
    assert found["compile"]["median_s"] == 0.2
