"""The numbers that are watched, from rollouts counted by hand."""

from __future__ import annotations

import pytest

from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry import training_metrics

FAST = RolloutStats(
    problem_id="L1/a", level=1, reward=1.0, format=True, compiled=True, correct=True, speedup=4.0,
    speedup_lo=3.5,    tokens=100, staleness=2, advantage=0.5, seconds={"generate": 2.0, "bench": 1.0},
)  # fmt: skip
SLOW = RolloutStats(
    problem_id="L1/a", level=1, reward=0.6, format=True, compiled=True, correct=True, speedup=1.44, tokens=50,
    speedup_lo=0.9, staleness=0, advantage=0.1, seconds={"generate": 4.0},
)  # fmt: skip
BROKEN = RolloutStats(problem_id="L2/b", level=2, reward=0.05, format=True, advantage=-0.6, completion_fraction=0.0)
CHEAT = RolloutStats(problem_id="L2/b", level=2, reward=-0.05, format=True, compiled=True, cheated=True)
ALL = [FAST, SLOW, BROKEN, CHEAT]


def test_rewards() -> None:
    values = training_metrics.scalars(ALL, per_level=True)
    assert values["reward/mean"] == pytest.approx(0.4)
    assert values["reward/std"] == pytest.approx(0.18125**0.5)
    assert (values["reward/min"], values["reward/max"]) == (-0.05, 1.0)


def test_rates_are_shares_of_all_rollouts() -> None:
    values = training_metrics.scalars(ALL, per_level=True)
    rates = {tag: value for tag, value in values.items() if tag.startswith("rate/")}
    assert rates == {
        "rate/format": 1.0, "rate/compile": 0.75, "rate/correct": 0.5, "rate/cheat": 0.25, "rate/fast_1": 0.5,
        "rate/fast_1_proven": 0.25, "rate/truncated": 0.25,
    }  # fmt: skip


def test_speedups_are_those_of_correct_kernels_only() -> None:
    cheating_fast = RolloutStats(problem_id="x", level=1, reward=0, speedup=100.0)
    values = training_metrics.scalars([*ALL, cheating_fast], per_level=True)
    assert (values["speedup/mean"], values["speedup/geometric_mean"], values["speedup/max"]) == pytest.approx(
        (2.72, 2.4, 4.0)
    )


def test_without_a_correct_kernel_there_is_no_speedup() -> None:
    assert not [tag for tag in training_metrics.scalars([BROKEN], per_level=True) if "speedup" in tag]


def test_levels_are_broken_down() -> None:
    values = training_metrics.scalars(ALL, per_level=True)
    assert values["level1/correct_rate"] == 1.0
    assert values["level1/speedup_mean"] == pytest.approx(2.4)
    assert values["level2/correct_rate"] == 0.0
    assert "level2/speedup_mean" not in values
    assert not [tag for tag in training_metrics.scalars(ALL, per_level=False) if tag.startswith("level")]


def test_turns_are_broken_down_where_there_are_several() -> None:
    second = RolloutStats(problem_id="x", level=1, reward=0.8, turn=1)
    values = training_metrics.scalars([BROKEN, second], per_level=True)
    assert (values["turn_1/reward_mean"], values["turn_2/reward_mean"]) == (0.05, 0.8)
    assert not [tag for tag in training_metrics.scalars(ALL, per_level=True) if tag.startswith("turn")]


def test_age_and_times_are_means_over_those_that_have_them() -> None:
    values = training_metrics.scalars(ALL, per_level=True)
    assert (values["staleness/versions_mean"], values["staleness/versions_max"]) == (1.0, 2)
    assert (values["time/generate_s"], values["time/bench_s"]) == (3.0, 1.0)
    assert values["time/rollout_s"] == 3.5
    assert values["tokens/answer_mean"] == 37.5


def test_nothing_gives_nothing() -> None:
    assert training_metrics.scalars([], per_level=True) == {}


def test_histograms_hold_every_value() -> None:
    made = training_metrics.histograms(ALL)
    assert made.rewards == [1.0, 0.6, 0.05, -0.05]
    assert made.speedups == [4.0, 1.44]
    assert made.advantages == [0.5, 0.1, -0.6]


def test_the_learners_metrics_go_into_a_folder() -> None:
    assert training_metrics.policy_scalars({"kl": 1, "time/backward_s": 2}) == {"policy/kl": 1, "time/backward_s": 2}
