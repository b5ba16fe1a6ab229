"""Several seeds as one side of a comparison."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kbrl_async.cli import main
from kbrl_async.evaluation import document
from kbrl_async.evaluation.metrics import sample_of
from kbrl_async.lab.report.comparing import Side
from kbrl_async.lab.report.pooling import pooled
from tests.records import stats
from tests.slow_bench import SlowBench


def side(seed: int, rate: float, correct: bool = True) -> Side:
    samples = [sample_of(stats(problem_id=f"L1/{n}", correct=correct), seed) for n in range(3)]
    summary = {
        "seed": seed,
        "method": "grpo",
        "updates": 3,
        "correct_rate_last": rate,
        "correct_rate_last_95": [0.0, 1.0],
    }
    made = document.build(samples, policy={}, settings={})
    return Side(str(seed), summary, {"loss": "grpo", "seed": str(seed)}, {"eval-after": {"L1/a": samples}}, made)


def test_figures_are_means_with_an_interval_over_the_seeds() -> None:
    found = pooled("grpo", [side(0, 0.2), side(1, 0.4), side(2, 0.6)])
    assert found.summary["correct_rate_last"] == pytest.approx(0.4)
    half = 4.302653 * 0.2 / math.sqrt(3)
    assert found.summary["correct_rate_last_95"] == pytest.approx([0.4 - half, 0.4 + half])
    assert (found.summary["updates"], found.summary["method"], found.config["seed"]) == (3, "grpo", "0, 1, 2")


def test_answers_are_put_together_problem_by_problem() -> None:
    found = pooled("grpo", [side(0, 0.2), side(1, 0.4, correct=False)])
    assert len(found.heldout["eval-after"]["L1/a"]) == 6
    assert found.evaluation is not None
    raw = found.evaluation.overall.raw
    assert raw is not None
    assert (raw.samples, raw.correct.value) == (6, 0.5)


def test_compare_takes_arms_and_refuses_what_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one, two, three = (str(SlowBench(updates=4).folder(tmp_path / name)) for name in ("one", "two", "three"))
    assert main(["compare", f"both={one},{two}", three]) == 0
    said = capsys.readouterr().out
    assert "both: 2 seeds" in said
    assert "three: First" in said
    assert main(["compare", f"both={one},"]) == 2
    assert "names no runs" in capsys.readouterr().err
