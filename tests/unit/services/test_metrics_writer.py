"""What an update says on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kbrl_async.rollouts.buffer.events import Admitted, BatchTrained, RolloutScored
from kbrl_async.rollouts.rewards.presets import STAGE3
from kbrl_async.rollouts.scoring import score
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.commands import Command, RolloutEnded
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_state import RunState
from protocols.records import BenchReport, Fault, Timing, UpdateReport, Verdict
from services.reward_aggregator.metrics_writer import MetricsWriter
from tests.records import record, stats
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


def test_an_update_says_how_far_the_run_is_and_what_it_took(tmp_path: Path) -> None:
    config = settings(max_steps=8, **{"tensorboard.enabled": "true"})
    frame, state = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
    writer = MetricsWriter(frame, state)
    for version, at in ((1, 100.0), (2, 130.0)):
        report = UpdateReport("b", version, {"time/checkpoint_s": 0.5}, at - 4, at)
        writer.updated(report, [rollout(version)], state.counters())
    events = EventAccumulator(str(tmp_path / "tensorboard" / "training"))
    events.Reload()
    wanted = ("progress/batch", "progress/done_frac", "time/train_s", "time/total_s", "time/checkpoint_s")
    last = {tag: (events.Scalars(tag)[-1].step, events.Scalars(tag)[-1].value) for tag in wanted}
    assert last == {
        "progress/batch": (2, 2.0), "progress/done_frac": (2, 0.25), "time/train_s": (2, 4.0),
        "time/total_s": (2, 30.0), "time/checkpoint_s": (2, 0.5),
    }  # fmt: skip


def test_what_is_told_of_answers_is_of_the_newest_version_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the batch, which has the quickest groups of several versions."""
    config = settings()
    frame, state = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
    monkeypatch.setattr(RunState, "version", 1)
    writer = MetricsWriter(frame, state)

    def group(name: str, version: int, *correct: bool) -> list[Command]:
        ended = [
            RolloutEnded(f"{name}.r{n}", name, stats(1.0, correct=c, compiled=True, policy_version=version))
            for n, c in enumerate(correct)
        ]
        scored = [RolloutScored(name, f"{name}.r{n}", [], 1.0) for n in range(len(correct))]
        return [Admitted(name, "L1/a", 1, 2, version, 0.0), *ended, *scored]

    writer.note([*group("g0", 0, True, False), *group("g1", 0, False)])
    writer.note([BatchTrained("b0", 1, 2.0)])
    writer.updated(UpdateReport("b0", 1, {}), [rollout(0)], state.counters())
    late = RolloutEnded("g1.r1", "g1", stats(1.0, correct=True, compiled=True))
    writer.note([late, RolloutScored("g1", "g1.r1", [], 3.0)])
    writer.note([BatchTrained("b1", 2, 4.0)])
    writer.updated(UpdateReport("b1", 2, {}), [rollout(0)], state.counters())
    assert isinstance(frame.log, Log)
    first, second = (line.facts for line in frame.log.lines)
    assert "answers_of" not in first, "one of version 0 is still awaited"
    assert (second["answers_of"], second["correct_rate"], second["compile_rate"]) == (0, 0.5, 1.0)


def test_an_update_is_one_short_line_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()
    frame, state = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
    writer = MetricsWriter(frame, state)
    monkeypatch.setattr(RunState, "version", 1)
    fast = stats(0.4, correct=True, compiled=True, speedup=1.25)
    ended = [RolloutEnded(f"g0.r{n}", "g0", one) for n, one in enumerate((fast, stats(0.0)))]
    scored = [RolloutScored("g0", f"g0.r{n}", [], 1.0) for n in range(2)]
    writer.note([Admitted("g0", "L1/a", 1, 2, 0, 0.0), *ended, *scored, BatchTrained("b0", 1, 2.0)])
    writer.updated(UpdateReport("b", 3, {}), [rollout(0)], state.counters())
    assert isinstance(frame.log, Log)
    words = frame.log.lines[-1].facts["shown"]
    assert words.startswith("update 3/14 v0: reward 0.20 compile 50% correct 50%")
    assert len("12:34:56 ") + len(words) <= 80
