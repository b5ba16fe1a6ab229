"""Solver, verifier and corrector: who is asked when, what a prediction says, and what it is worth."""

from __future__ import annotations

import pytest

from kbrl_async.rollouts.prompts.roles import OUTCOMES, predicted, prediction_reward, render_verifier, role_of
from protocols.records import Problem

PROBLEM = Problem("L1/a", 1, "a", "import torch\nclass Model:\n    pass\n")


def test_a_solver_begins_and_every_kernel_is_judged() -> None:
    assert [role_of(turn) for turn in range(5)] == ["solver", "verifier", "corrector", "verifier", "corrector"]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("compile\n", "compile"),
        ("It looks slow, but a bound is off.\nVERDICT: mismatch", "mismatch"),
        ("<think>fast fast</think>verdict: runtime: writes past the end", "runtime"),
        ("no idea", ""),
        ("breakfast", ""),
    ],
)
def test_a_prediction_is_the_word_of_its_last_verdict_line(answer: str, outcome: str) -> None:
    assert predicted(answer) == outcome


def test_the_right_outcome_pays_all_and_knowing_right_from_wrong_pays_half() -> None:
    assert prediction_reward("compile", "compile") == 1.0
    assert prediction_reward("runtime", "compile") == 0.5
    assert prediction_reward("fast", "slow") == 0.5
    assert prediction_reward("fast", "compile") == 0.0
    assert prediction_reward("", "compile") == 0.0


def test_the_verifier_sees_the_kernel_and_never_its_verdict() -> None:
    for option in ("compact", "zero_shot"):
        prompt = render_verifier(option, PROBLEM, "KERNEL\n")
        assert "KERNEL" in prompt
        assert "Feedback" not in prompt
    assert all(word in render_verifier("zero_shot", PROBLEM, "K") for word in OUTCOMES)
