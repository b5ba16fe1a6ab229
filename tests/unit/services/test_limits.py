"""A run that is continued with other limits ends where they say, whatever was under way when it stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from services.reward_aggregator.archiving import Archiving

from kbrl_async.rollouts.buffer.buffer import RUN_ENDED, rollout_ids
from kbrl_async.rollouts.buffer.events import Admitted, BatchMade, Change
from kbrl_async.runs.config import Config, load
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_journal import Journal
from kbrl_async.runs.run_state import AFTER, BEFORE, Evaluated, RunState
from services.reward_aggregator.actor import Aggregator
from services.reward_aggregator.metrics_writer import MetricsWriter
from tests.records import sample
from tests.unit.services.test_catching_up import PATIENCE_S, Silent, service

MINUTE = 60.0


class Broker(Silent):
    """Never answers, and knows what is retired."""

    def __init__(self) -> None:
        super().__init__()
        self.retired: set[str] = set()

    async def retire(self, group_id: str) -> None:
        self.retired.add(group_id)


def settings(**values: object) -> Config:
    small = {"tensorboard.enabled": "false", "level": 1, "batch_size": 2, "group_size": 2, "eval_samples": 0}
    return load(overrides=[f"{key}={value}" for key, value in {**small, **values}.items()])


class Before:
    """The life of a run until it was stopped, in its journal."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.campaign, self.folder = RunState(plan_of(config)), folder

    def _keep(self, change: Change) -> Change:
        assert change.event is not None
        self.campaign.note(change.event, change.closed)
        with Journal(self.folder / "aggregator.sqlite") as journal:
            journal.append([change.event], [group.group_id for group in change.closed])
        return change

    def group(self, *, scored: bool = True) -> None:
        book, problem = self.campaign.book, self.campaign.plan.training[0]
        opened = self._keep(book.admit(problem.problem_id, 1, 2, 1.0)).event
        assert isinstance(opened, Admitted)
        for number, rollout_id in enumerate(rollout_ids(opened.group_id, 2) if scored else []):
            self._keep(book.scored(opened.group_id, rollout_id, [sample(rollout_id, float(number), book.version)], 1.0))

    def batch(self) -> BatchMade:
        made = self._keep(self.campaign.book.poll(1.0)).event
        assert isinstance(made, BatchMade)
        return made

    def update(self) -> None:
        self.group()
        self.group()
        batch = self.batch()
        self._keep(self.campaign.book.trained(batch.batch_id, batch.index + 1, 1.0))


async def goes_on(folder: Path, config: Config, broker: Broker, seconds: float = PATIENCE_S) -> RunState:
    """The campaign when the pump has ended by itself; `TimeoutError` where it does not."""
    frame, campaign = service("reward_aggregator", folder, config), RunState(plan_of(config))
    with Journal(folder / "aggregator.sqlite") as journal, Archiving(config, folder) as archive:
        journal.load(campaign)
        board = MetricsWriter(frame, campaign)
        actor = Aggregator(frame, campaign, journal, broker, board, archive)  # type: ignore[arg-type]
        async with asyncio.timeout(seconds):
            await actor.pump()
    return campaign


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_continued_with_no_more_steps_than_it_has_made_ends(tmp_path: Path, steps: int) -> None:
    run = Before(tmp_path, settings(max_steps=8))
    run.update()
    run.update()
    run.group()
    run.group(scored=False)
    broker = Broker()
    campaign = asyncio.run(goes_on(tmp_path, settings(max_steps=steps), broker))
    assert campaign.book.batches_trained == 2
    assert campaign.book.reasons == {RUN_ENDED: 2}, "what waited for a batch is counted, not lost"
    campaign.book.check()
    assert not broker.asked
    assert broker.retired == {"g000004", "g000005"}


def test_it_ends_where_the_last_batch_leaves_groups_over(tmp_path: Path) -> None:
    run = Before(tmp_path, settings(max_steps=8))
    for _ in range(4):
        run.group()
    batch = run.batch()

    async def trained_meanwhile() -> RunState:
        config, broker = settings(max_steps=1), Broker()
        frame, campaign = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
        with Journal(tmp_path / "aggregator.sqlite") as journal, Archiving(config, tmp_path) as archive:
            journal.load(campaign)
            actor = Aggregator(frame, campaign, journal, broker, MetricsWriter(frame, campaign), archive)  # type: ignore[arg-type]
            pumping = asyncio.ensure_future(actor.pump())
            async with asyncio.timeout(PATIENCE_S):
                while batch.batch_id not in broker.asked:
                    await asyncio.sleep(0)
                actor._change(campaign.book.trained(batch.batch_id, 1, 2.0))
                await pumping
        return campaign

    assert asyncio.run(trained_meanwhile()).book.reasons == {RUN_ENDED: 2}


def test_a_run_whose_time_was_over_before_it_was_continued_asks_for_nothing_more(tmp_path: Path) -> None:
    run = Before(tmp_path, settings(max_steps=8))
    run.update()
    run.group(scored=False)
    with Journal(tmp_path / "aggregator.sqlite") as journal:
        journal.append([Evaluated(BEFORE, "late", None, at=3 * MINUTE)])
    broker = Broker()
    campaign = asyncio.run(goes_on(tmp_path, settings(max_steps=8, max_minutes=1), broker))
    assert campaign.book.reasons == {RUN_ENDED: 1}
    assert not broker.asked


def test_more_steps_come_too_late_once_the_last_evaluation_is_under_way(tmp_path: Path) -> None:
    run = Before(tmp_path, settings(max_steps=1, eval_samples=1))
    problems = [problem.problem_id for problem in run.campaign.plan.heldout]
    with Journal(tmp_path / "aggregator.sqlite") as journal:
        journal.append([Evaluated(BEFORE, f"{BEFORE}.{name}.0", None) for name in problems])
    run.update()
    broker = Broker()
    with pytest.raises(TimeoutError):
        asyncio.run(goes_on(tmp_path, settings(max_steps=1, eval_samples=1), broker, 0.3))
    again = Broker()
    with pytest.raises(TimeoutError):
        asyncio.run(goes_on(tmp_path, settings(max_steps=2, eval_samples=1), again, 0.3))
    assert broker.asked.keys() == again.asked.keys(), "training on would mix two policies in one evaluation"
    assert all(name.startswith(AFTER) for name in again.asked)
