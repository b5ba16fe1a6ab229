"""What an update says on the terminal."""

from __future__ import annotations

from pathlib import Path

from kbrl_async.rollouts.rewards.presets import STAGE3
from kbrl_async.rollouts.scoring import score
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_state import RunState
from protocols.records import BenchReport, Fault, Timing, UpdateReport, Verdict
from services.reward_aggregator.metrics_writer import MetricsWriter
from tests.records import record
from tests.unit.services.log import Line, Log
from tests.unit.services.test_catching_up import service
from tests.unit.services.test_limits import settings


def rollout(number: int, *, cheated: bool = False) -> RolloutStats:
    name = "L1/22_max_pool" if number % 2 else "L1/01_tanh"
    return RolloutStats(problem_id=name, level=1, reward=0.0, cheated=cheated, rollout_id=f"g.r{number}")


def told(folder: Path, rollouts: list[RolloutStats]) -> list[Line]:
    config = settings()
    frame, state = service("reward_aggregator", folder, config), RunState(plan_of(config))
    MetricsWriter(frame, state).updated(UpdateReport("b", 3, {}), rollouts, state.counters())
    assert isinstance(frame.log, Log)
    return frame.log.lines


def test_a_kernel_whose_time_was_disturbed_is_not_kept_as_the_fastest(tmp_path: Path) -> None:
    config = settings()
    frame, state = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
    writer = MetricsWriter(frame, state)
    wide = Timing(2, 9.0, 1.2, 7e11, 1.0, 9.0)
    for timing, kept in ((wide, ""), (Timing(9, 1.2, 1.1, 1.3, 1.0, 1.2), "kernels/L1_07_relu.py")):
        scored = score(record(bench=BenchReport(Verdict(Fault.OK, 4, 4), timing)), STAGE3)
        assert scored is not None
        assert writer.keep_kernel(scored).file == kept


def test_an_update_without_cheating_says_nothing_of_it(tmp_path: Path) -> None:
    lines = told(tmp_path, [rollout(n) for n in range(20)])
    assert [line.event for line in lines] == ["update"]
    assert "cheat_rate" not in lines[0].facts


def test_few_who_are_caught_are_a_figure_of_the_update(tmp_path: Path) -> None:
    lines = told(tmp_path, [rollout(n, cheated=n < 2) for n in range(20)])
    assert [line.event for line in lines] == ["update"]
    assert lines[0].facts["cheat_rate"] == 0.1


def test_many_are_warned_of_with_one_to_look_at(tmp_path: Path) -> None:
    warning = told(tmp_path, [rollout(n, cheated=n in (1, 3, 4)) for n in range(20)])[1]
    assert (warning.level, warning.facts["share"]) == ("warning", 0.15)
    assert warning.facts["most"] == "L1/22_max_pool ×2"
    assert warning.facts["look"] == "kbrl inspect g.r1"
