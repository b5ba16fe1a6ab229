"""Alarms: raised by a window and not by an update, cleared with a margin, and what they do to admission."""

from __future__ import annotations

import pytest

from kbrl_async.rollouts.alarms import AlarmWatch, rules_of
from kbrl_async.rollouts.buffer.buffer import RolloutBuffer, rollout_ids
from tests.plans import alarms as settings
from tests.plans import buffer_rules
from tests.records import sample

LOW = settings(ess_below=0.5, window=3, margin=0.1)


def alarms(**changes: object) -> AlarmWatch:
    return AlarmWatch(rules_of(settings(**{"ess_below": 0.5, **changes})))  # type: ignore[arg-type]


def levels(board: AlarmWatch, values: list[float]) -> list[int]:
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
    assert "ess" not in AlarmWatch(rules_of(settings())).levels
    board = alarms(window=1)
    assert board.observe(0, {}) == []


@pytest.mark.parametrize(("metric", "bad"), [("mismatch_kl", 2.0), ("entropy", 0.01), ("nonfinite", 1.0)])
def test_each_metric_has_its_side(metric: str, bad: float) -> None:
    board = AlarmWatch(rules_of(settings(kl_above=1.0, entropy_below=0.1, window=1)))
    (change,) = board.observe(0, {metric: bad})
    assert change.rule.metric == metric
    assert change.level == 1
    assert metric in change.in_words()


def test_lowering_goes_down_by_levels_and_pausing_to_nothing() -> None:
    lower = alarms(window=1, ess_action="lower_staleness")
    seen = [lower.allowed_staleness(3)]
    for version in range(4):
        lower.observe(version, {"ess": 0.1})
        seen.append(lower.allowed_staleness(3))
    assert seen == [3, 2, 1, 0, 0]
    pause = alarms(window=1, ess_action="pause_admission")
    pause.observe(0, {"ess": 0.1})
    assert pause.allowed_staleness(3) == 0


# ── what the group book makes of it ───────────────────────────────────────────────────────────────────────────────


def book(**options: int) -> RolloutBuffer:
    return RolloutBuffer(buffer_rules(batch_size=2, max_steps=9, max_staleness=2, **options))


def admit(made: RolloutBuffer) -> str:
    event = made.take(made.admission("p", 1, 2, 0.0)).event
    assert event is not None
    return event.group_id  # type: ignore[union-attr]


def score(made: RolloutBuffer, group_id: str, rewards: tuple[float, float] = (0.0, 1.0)) -> None:
    for rollout_id, reward in zip(rollout_ids(group_id, 2), rewards, strict=True):
        made.take(made.scored(group_id, rollout_id, [sample(rollout_id, reward, made.version)], 0.0))


def test_a_lowered_window_admits_fewer_groups() -> None:
    made = book()
    assert made.room() == 6
    made.allowed_staleness = 0
    assert made.room() == 2


def test_a_pause_admits_nothing_while_what_is_open_may_still_end() -> None:
    made = book()
    first, second = admit(made), admit(made)
    made.is_paused, made.allowed_staleness = True, 0
    score(made, first)
    assert made.room() == 0
    score(made, second)
    batch = made.take(made.poll(0.0)).event
    assert made.room() == 0, "a batch is under way"
    made.take(made.trained(batch.batch_id, 1, 0.0))  # type: ignore[union-attr]
    assert made.room() == 2


def test_a_pause_ends_where_too_few_groups_are_left_for_a_batch() -> None:
    made = book()
    first, second = admit(made), admit(made)
    made.is_paused, made.allowed_staleness = True, 0
    score(made, first)
    score(made, second, (0.5, 0.5))  # all alike: filtered
    assert made.take(made.poll(0.0)).event is None
    assert made.room() == 1, "the one ready group would wait for ever"
