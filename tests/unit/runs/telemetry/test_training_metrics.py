"""The numbers that are watched, from rollouts counted by hand."""

from __future__ import annotations

import msgspec
import pytest

from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry import training_metrics
from tests.records import stats

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
    values = training_metrics.scalars(ALL)
    assert values["batch/reward_mean"] == pytest.approx(0.4)
    assert values["batch/reward_std"] == pytest.approx(0.18125**0.5)
    assert (values["batch/reward_min"], values["batch/reward_max"]) == (-0.05, 1.0)


def test_rates_are_shares_of_all_rollouts() -> None:
    values = training_metrics.scalars(ALL)
    rates = {tag: value for tag, value in values.items() if tag.endswith("_rate") or "fast" in tag}
    assert rates == {
        "batch/format_rate": 1.0, "batch/compile_rate": 0.75, "batch/correct_rate": 0.5, "batch/cheat_rate": 0.25,
        "batch/fast_1": 0.5, "batch/fast_1_proven": 0.25, "batch/truncated_rate": 0.25,
    }  # fmt: skip


def test_speedups_are_those_of_correct_kernels_only() -> None:
    cheating_fast = RolloutStats(problem_id="x", level=1, reward=0, speedup=100.0)
    values = training_metrics.scalars([*ALL, cheating_fast])
    assert (values["batch/speedup_mean"], values["batch/speedup_max"]) == pytest.approx((2.4, 4.0))


def test_workloads_are_counted_where_a_problem_has_several() -> None:
    several = [msgspec.structs.replace(BROKEN, workload_share=share) for share in (1.0, 0.5)]
    assert training_metrics.outcome_rates([*several, BROKEN])["workload_rate"] == 0.75
    assert "workload_rate" not in training_metrics.outcome_rates([BROKEN])


def test_of_answers_with_extensions_those_are_counted_that_were_built_in_full() -> None:
    rollouts = [stats(built=built) for built in ((), ("fast",), ("fast", "symbol a"), ("fast",), ("fast",))]
    assert training_metrics.scalars(rollouts)["batch/full_build_rate"] == 0.25
    assert "batch/full_build_rate" not in training_metrics.scalars([stats()])


def test_without_a_correct_kernel_there_is_no_speedup() -> None:
    assert not [tag for tag in training_metrics.scalars([BROKEN]) if "speedup" in tag]


def test_levels_are_broken_down_by_the_version_that_wrote_the_answers() -> None:
    values = training_metrics.version_scalars(ALL, per_level=True)
    assert values["level1/correct_rate"] == 1.0
    assert values["level1/speedup_mean"] == pytest.approx(2.4)
    assert values["level2/correct_rate"] == 0.0
    assert "level2/speedup_mean" not in values
    assert not [tag for tag in training_metrics.version_scalars(ALL, per_level=False) if tag.startswith("level")]


def test_turns_are_broken_down_where_there_are_several() -> None:
    second = RolloutStats(problem_id="x", level=1, reward=0.8, turn=1)
    values = training_metrics.version_scalars([BROKEN, second], per_level=True)
    assert (values["turn_1/reward_mean"], values["turn_2/reward_mean"]) == (0.05, 0.8)
    assert not [tag for tag in training_metrics.version_scalars(ALL, per_level=True) if tag.startswith("turn")]


def test_what_a_batch_says_of_answers_is_called_the_batch_s() -> None:
    turns = [BROKEN, RolloutStats(problem_id="x", level=1, reward=0.8, turn=1, role="verifier")]
    folders = {tag.split("/")[0] for tag in training_metrics.scalars([*ALL, *turns])}
    assert folders == {"batch", "staleness", "time", "tokens"}


def test_age_and_times_are_means_over_those_that_have_them() -> None:
    values = training_metrics.scalars(ALL)
    assert (values["staleness/versions_mean"], values["staleness/versions_max"]) == (1.0, 2)
    assert (values["time/generate_s"], values["time/bench_s"]) == (3.0, 1.0)
    assert values["time/rollout_s"] == 3.5
    assert values["tokens/answer_mean"] == 37.5


def test_nothing_gives_nothing() -> None:
    assert training_metrics.scalars([]) == {}


def test_histograms_hold_every_value() -> None:
    made = training_metrics.histograms(ALL)
    assert made.rewards == [1.0, 0.6, 0.05, -0.05]
    assert made.speedups == [4.0, 1.44]
    assert made.advantages == [0.5, 0.1, -0.6]


def test_the_learners_metrics_go_into_a_folder() -> None:
    assert training_metrics.policy_scalars({"kl": 1, "time/backward_s": 2}) == {"policy/kl": 1, "time/backward_s": 2}
