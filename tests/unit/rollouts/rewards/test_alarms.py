"""Alarms: raised by a window and not by an update, cleared with a margin, and what they do to admission."""

from __future__ import annotations

import pytest

from kbrl_async.rollouts.alarms import AlarmOptions, Alarms
from kbrl_async.rollouts.buffer.buffer import BufferOptions, RolloutBuffer, rollout_ids
from tests.records import sample

LOW = AlarmOptions(ess_below=0.5, window=3, margin=0.1)


def alarms(**changes: object) -> Alarms:
    return Alarms(AlarmOptions(**{"ess_below": 0.5, **changes}).rules())  # type: ignore[arg-type]


def levels(board: Alarms, values: list[float]) -> list[int]:
    out = []
    for version, value in enumerate(values):
        board.observe(version, {"ess": value})
        out.append(board.levels["ess"])
    return out


def test_one_bad_update_raises_nothing_and_a_bad_window_does() -> None:
    assert levels(alarms(), [0.9, 0.9, 0.1, 0.9, 0.9]) == [0, 0, 0, 0, 0]
    assert levels(alarms(), [0.9, 0.1, 0.1]) == [0, 0, 1]


def test_an_alarm_clears_only_with_a_margin_so_a_wavering_value_raises_it_once() -> None:
    board = alarms(window=1)
    assert levels(board, [0.4, 0.52, 0.49, 0.52, 0.6, 0.6]) == [1, 1, 2, 2, 0, 0]
    assert board.raised["ess"] == 1


def test_an_alarm_gets_worse_by_whole_windows() -> None:
    assert levels(alarms(window=2), [0.1] * 6) == [0, 1, 1, 2, 2, 3]


def test_a_threshold_of_nothing_is_no_alarm_and_a_missing_metric_no_value() -> None:
    assert levels(alarms(window=1), [0.1, 0.1]) == [1, 2]
    assert "ess" not in Alarms(AlarmOptions().rules()).levels
    board = alarms(window=1)
    assert board.observe(0, {}) == []


@pytest.mark.parametrize(("metric", "bad"), [("mismatch_kl", 2.0), ("entropy", 0.01), ("nonfinite", 1.0)])
def test_each_metric_has_its_side(metric: str, bad: float) -> None:
    board = Alarms(AlarmOptions(kl_above=1.0, entropy_below=0.1, window=1).rules())
    (change,) = board.observe(0, {metric: bad})
    assert change.rule.metric == metric
    assert change.level == 1
    assert metric in change.in_words()


def test_lowering_goes_down_by_levels_and_pausing_to_nothing() -> None:
    lower = alarms(window=1, ess_action="lower_staleness")
    seen = [lower.window_lag(3)]
    for version in range(4):
        lower.observe(version, {"ess": 0.1})
        seen.append(lower.window_lag(3))
    assert seen == [3, 2, 1, 0, 0]
    pause = alarms(window=1, ess_action="pause_admission")
    pause.observe(0, {"ess": 0.1})
    assert pause.window_lag(3) == 0


# ── what the group book makes of it ───────────────────────────────────────────────────────────────────────────────


def book(**options: int) -> RolloutBuffer:
    return RolloutBuffer(BufferOptions(groups_per_batch=2, max_batches=9, max_lag=2, **options))


def admit(made: RolloutBuffer) -> str:
    event = made.admit("p", 1, 2, 0.0).event
    assert event is not None
    return event.group_id  # type: ignore[union-attr]


def score(made: RolloutBuffer, group_id: str, rewards: tuple[float, float] = (0.0, 1.0)) -> None:
    for rollout_id, reward in zip(rollout_ids(group_id, 2), rewards, strict=True):
        made.scored(group_id, rollout_id, [sample(rollout_id, reward, made.version)], 0.0)


def test_a_lowered_window_admits_fewer_groups() -> None:
    made = book()
    assert made.room() == 6
    made.window_lag = 0
    assert made.room() == 2


def test_a_pause_admits_nothing_while_what_is_open_may_still_end() -> None:
    made = book()
    first, second = admit(made), admit(made)
    made.is_paused, made.window_lag = True, 0
    score(made, first)
    assert made.room() == 0
    score(made, second)
    batch = made.poll(0.0).event
    assert made.room() == 0, "a batch is under way"
    made.trained(batch.batch_id, 1, 0.0)  # type: ignore[union-attr]
    assert made.room() == 2


def test_a_pause_ends_where_too_few_groups_are_left_for_a_batch() -> None:
    made = book()
    first, second = admit(made), admit(made)
    made.is_paused, made.window_lag = True, 0
    score(made, first)
    score(made, second, (0.5, 0.5))  # all alike: filtered
    assert made.poll(0.0).event is None
    assert made.room() == 1, "the one ready group would wait for ever"
