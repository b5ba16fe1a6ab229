"""What the policy is told of its last kernel."""

from __future__ import annotations

import msgspec
import pytest

from kbrl_async.rollouts.prompts import TokenBudget, feedback_of, render_prompt, render_turn
from kbrl_async.rollouts.prompts.feedback import (
    CATEGORIES,
    ERROR_CHARACTERS,
    ERROR_LINES,
    KERNEL_CHARACTERS,
    Feedback,
    shortened,
)
from protocols.records import (
    INFRASTRUCTURE_FAULTS,
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    Timing,
    Verdict,
)
from protocols.rollout import Record
from tests.records import turn

PROBLEM = Problem("L1/a", 1, "a", "import torch\nclass Model:\n    pass\n\ndef get_inputs(): ...\n")
WRITTEN = Generation(0, [], [], [], "<think>secret thought</think>kernel", "stop", Candidate("KERNEL\n", "c"))
BUILT = BuildReport(Fault.OK)


def result(fault: Fault, *, message: str = "", speedup: float | None = None, lo: float = 0.0) -> BenchReport:
    timing = None if speedup is None else Timing(9, speedup, lo, 2 * speedup, 1.0, speedup)
    return BenchReport(Verdict(fault, passed=2, total=5, message=message), timing)


def told(record: Record, backend: str) -> Feedback:
    return feedback_of(record.verdict, record.timing, record.source, backend)


@pytest.mark.parametrize(
    ("record", "category"),
    [
        (turn(Generation(0, [], [], [], "", "stop", None, Fault.FORMAT_ERROR, "no block")), "format"),
        (turn(WRITTEN, BuildReport(Fault.STATIC_VIOLATION, message="asm")), "static"),
        (turn(WRITTEN, BuildReport(Fault.COMPILE_ERROR, message="x undeclared")), "compile"),
        (turn(WRITTEN, BUILT, result(Fault.ILLEGAL_ACCESS)), "runtime"),
        (turn(WRITTEN, BUILT, result(Fault.TIMEOUT)), "resources"),
        (turn(WRITTEN, BUILT, result(Fault.INCORRECT)), "mismatch"),
        (turn(WRITTEN, BUILT, result(Fault.OK, speedup=3.0, lo=0.9)), "slow"),
        (turn(WRITTEN, BUILT, result(Fault.OK, speedup=3.0, lo=1.5)), "fast"),
    ],
)
def test_every_end_of_a_turn_has_its_category_and_a_hint(record: Record, category: str) -> None:
    feedback = told(record, "c")
    assert feedback.category == category
    assert feedback.hint


def test_every_fault_of_a_candidate_has_a_category() -> None:
    assert set(CATEGORIES) == set(Fault) - INFRASTRUCTURE_FAULTS - {Fault.OK}


def test_thoughts_are_dropped_and_the_kernel_goes_on() -> None:
    prompt = render_turn("zero_shot", PROBLEM, told(turn(WRITTEN, BUILT, result(Fault.INCORRECT)), "c"))
    assert "KERNEL" in prompt
    assert "secret thought" not in prompt
    assert "Compiled: yes\nTests passed: 2 of 5\nFailed as: incorrect\n" in prompt


def test_a_correct_kernel_is_told_its_speed() -> None:
    prompt = render_turn("zero_shot", PROBLEM, told(turn(WRITTEN, BUILT, result(Fault.OK, speedup=0.5)), "c"))
    assert "Compiled: yes\n" in prompt
    assert "Speedup: 0.50×" in prompt
    assert "0.5 ms of PyTorch" in prompt


def test_what_limits_a_kernel_is_told_where_there_is_room() -> None:
    record = turn(WRITTEN, BUILT, result(Fault.OK, speedup=0.5))
    limited = feedback_of(record.verdict, record.timing, "KERNEL", "c", "loop in line 4: not vectorised")
    whole = render_turn("zero_shot", PROBLEM, limited)
    assert "What limits it:\nloop in line 4: not vectorised" in whole
    short = render_turn("zero_shot", PROBLEM, limited, budget=TokenBudget(len(whole) - 5, len))
    assert "not vectorised" not in short
    assert "KERNEL" in short


def test_what_did_not_compile_is_told_so() -> None:
    failed = told(turn(WRITTEN, BuildReport(Fault.COMPILE_ERROR, message="x undeclared")), "c")
    assert "Compiled: no\nFailed as: compile error\n" in render_turn("zero_shot", PROBLEM, failed)


def test_hints_speak_of_the_backend() -> None:
    record = turn(WRITTEN, BUILT, result(Fault.OK, speedup=0.5))
    assert told(record, "c").hint != told(record, "triton").hint


def test_an_error_is_cut_to_the_lines_that_matter() -> None:
    noise = "In file included from a.h\n| ^~~\nnote: declared here\n"
    text = shortened(noise + "\n".join(f"error {i} " + "x" * 200 for i in range(50)))
    assert text.startswith("error 0")
    assert len(text) <= ERROR_CHARACTERS
    assert len(text.splitlines()) <= ERROR_LINES


KERNEL = "".join(f"line {i} of the kernel\n" for i in range(40))
FAILED = turn(
    msgspec.structs.replace(WRITTEN, candidate=Candidate(KERNEL, "c")),
    BuildReport(Fault.COMPILE_ERROR, message="\n".join(f"error {i}" for i in range(8))),
)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("option", ["zero_shot", "compact"])
def test_no_budget_cuts_a_kernel_or_a_line_of_the_error(option: str) -> None:
    feedback = told(FAILED, "c")
    first = render_prompt(option, PROBLEM)
    whole = words(render_turn(option, PROBLEM, feedback))
    seen = set()
    for limit in range(words(first), whole + 2):
        prompt = render_turn(option, PROBLEM, feedback, "c", TokenBudget(limit, words))
        assert words(prompt) <= limit
        assert ("line 0" in prompt) == ("line 39 of the kernel" in prompt)
        assert (
            prompt == first
            or option == "compact"
            or all(line in feedback.error.splitlines() for line in prompt.splitlines() if line.startswith("error "))
        )
        seen.add(prompt)
    assert first in seen
    assert render_turn(option, PROBLEM, feedback) in seen
    assert len(seen) == (2 if option == "compact" else 9)


def test_what_is_shown_of_an_error_goes_before_the_kernel_does() -> None:
    feedback = told(FAILED, "c")
    whole = words(render_turn("zero_shot", PROBLEM, feedback))
    prompt = render_turn("zero_shot", PROBLEM, feedback, "c", TokenBudget(whole - 1, words))
    assert "line 39" in prompt
    assert "error 3" in prompt
    assert "error 4" not in prompt


def test_a_problem_that_does_not_fit_by_itself_is_left_to_the_sampler_to_refuse() -> None:
    feedback = told(FAILED, "c")
    assert render_turn("compact", PROBLEM, feedback, "c", TokenBudget(1, words)) == render_prompt("compact", PROBLEM)


def test_a_kernel_beyond_all_measure_is_not_shown_again() -> None:
    huge = msgspec.structs.replace(WRITTEN, candidate=Candidate("x" * (KERNEL_CHARACTERS + 1), "c"))
    prompt = render_turn("zero_shot", PROBLEM, told(turn(huge, BUILT, result(Fault.INCORRECT)), "c"))
    assert "too long to be shown again" in prompt
    assert "xxx" not in prompt


def test_the_compact_form_ends_like_a_first_turn() -> None:
    prompt = render_turn("compact", PROBLEM, told(turn(WRITTEN, BUILT, result(Fault.INCORRECT)), "c"))
    assert prompt.endswith("### Attempt\nKERNEL\n### Feedback: mismatch\n### ModelNew\n")
    assert prompt.count("### ModelNew") == 1
