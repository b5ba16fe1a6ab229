"""What the sampler's controller is told of the queues behind it; and that long answers hold no batch back."""

from __future__ import annotations

import pytest

from kbrl_async.rewards.groups import BookOptions, GroupBook, rollout_ids
from kbrl_async.sampling.engine import EngineStats
from protocols.messages import Stage, StageStanding, StatusReport, WorkerStanding
from protocols.records import TrainSample
from services.sampler.steering import signals

ENGINE = EngineStats(3, kv_usage=0.5, preemptions=2)


def test_the_longest_queue_behind_counts_and_the_samplers_before_it() -> None:
    report = StatusReport(
        stages=[
            StageStanding(Stage.GENERATE, queued=90),
            StageStanding(Stage.COMPILE, queued=7),
            StageStanding(Stage.BENCH, queued=40),
        ],
        workers=[WorkerStanding(f"sampler.{i}", [Stage.GENERATE]) for i in (1, 2)]
        + [WorkerStanding("b", [Stage.BENCH])],
        rates={"rollouts_per_s": 3.5},
    )
    seen = signals(1.0, 12, 99, ENGINE, report)
    assert (seen.queued_behind, seen.rate_behind, seen.samplers) == (40, 3.5, 2)
    assert (seen.kv_usage, seen.preemptions, seen.active, seen.finished) == (0.5, 2, 12, 99)


@pytest.mark.parametrize("report", [None, StatusReport()])
def test_a_broker_that_says_nothing_bounds_nothing(report: StatusReport | None) -> None:
    assert signals(1.0, 12, 99, ENGINE, report).rate_behind is None


def test_a_rollout_with_a_long_tail_holds_only_its_own_group() -> None:
    book = GroupBook(BookOptions(groups_per_batch=2, max_batches=4, max_lag=1, hold_s=10.0))
    groups = [book.admit("p", 1, 2, 0.0).event.group_id for _ in range(4)]  # type: ignore[union-attr]
    for group_id in groups[1:]:
        for i, rollout in enumerate(rollout_ids(group_id, 2)):
            book.scored(group_id, rollout, [TrainSample(rollout, [1], [2], [-1.0], 0.0, float(i), 0)], 0.0)
    book.scored(groups[0], rollout_ids(groups[0], 2)[0], [TrainSample("r", [1], [2], [-1.0], 0.0, 0.0, 0)], 0.0)
    made = book.poll(0.0).event
    assert made is not None
    assert set(made.group_ids) == set(groups[1:3])  # type: ignore[union-attr]
