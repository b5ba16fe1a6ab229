"""A run that is continued with other limits ends where they say, whatever was under way when it stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kbrl_async.evaluation.heldout import AFTER, BEFORE
from kbrl_async.rollouts.buffer.buffer import RUN_ENDED, rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade
from kbrl_async.runs.archive.recorder import RolloutRecorder
from kbrl_async.runs.commands import Command, Evaluated, closed_in
from kbrl_async.runs.config import Config, load
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import RunState
from tests.records import sample, stats
from tests.unit.services.test_catching_up import PATIENCE_S, Silent, aggregator, asked_all, service

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
        self.state, self.folder = RunState(plan_of(config)), folder

    def _do(self, *commands: Command | None) -> None:
        done = [command for command in commands if command is not None]
        effects = [effect for command in done for effect in self.state.do(command)]
        with RunJournal(self.folder / "aggregator.sqlite") as journal:
            journal.append(done, [group.group_id for group in closed_in(effects)])

    def group(self, *, scored: bool = True) -> None:
        opened = self.state.admission(1.0)
        assert opened is not None
        self._do(opened)
        for number, rollout_id in enumerate(rollout_ids(opened.group_id, 2) if scored else []):
            made = sample(rollout_id, float(number), self.state.version)
            self._do(*self.state.ended(opened.group_id, rollout_id, made, stats(problem_id=opened.problem_id), 1.0))

    def batch(self) -> BatchMade:
        made = self.state.batch_step(1.0)
        assert isinstance(made, BatchMade)
        self._do(made)
        return made

    def update(self) -> None:
        self.group()
        self.group()
        batch = self.batch()
        self._do(*self.state.trained(batch.batch_id, batch.index + 1, {}, "", 1.0))


async def goes_on(folder: Path, config: Config, broker: Broker) -> RunState:
    """The state when the pump has ended by itself; `TimeoutError` where it does not."""
    frame, state = service("reward_aggregator", folder, config), RunState(plan_of(config))
    with RunJournal(folder / "aggregator.sqlite") as journal, RolloutRecorder(config.archive, folder) as recorder:
        journal.load(state)
        actor = aggregator(frame, state, journal, broker, recorder)
        async with asyncio.timeout(PATIENCE_S):
            await actor.pump()
    return state


async def waits(folder: Path, config: Config, broker: Broker) -> None:
    """Until it has asked for all that it wants; it does not end by itself."""
    pumping = asyncio.ensure_future(goes_on(folder, config, broker))
    await asked_all(broker)
    assert not pumping.done()
    pumping.cancel()
    await asyncio.gather(pumping, return_exceptions=True)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_continued_with_no_more_steps_than_it_has_made_ends(tmp_path: Path, steps: int) -> None:
    run = Before(tmp_path, settings(max_steps=8))
    run.update()
    run.update()
    run.group()
    run.group(scored=False)
    broker = Broker()
    state = asyncio.run(goes_on(tmp_path, settings(max_steps=steps), broker))
    assert state.updates == 2
    assert state.reasons == {RUN_ENDED: 2}, "what waited for a batch is counted, not lost"
    assert state.counters().groups_admitted == state.counters().ended
    assert not broker.asked
    assert broker.retired == {"g000004", "g000005"}


def test_it_ends_where_the_last_batch_leaves_groups_over(tmp_path: Path) -> None:
    run = Before(tmp_path, settings(max_steps=8))
    for _ in range(4):
        run.group()
    batch = run.batch()

    async def trained_meanwhile() -> RunState:
        config, broker = settings(max_steps=1), Broker()
        frame, state = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
        with (
            RunJournal(tmp_path / "aggregator.sqlite") as journal,
            RolloutRecorder(config.archive, tmp_path) as recorder,
        ):
            journal.load(state)
            actor = aggregator(frame, state, journal, broker, recorder)
            pumping = asyncio.ensure_future(actor.pump())
            async with asyncio.timeout(PATIENCE_S):
                while batch.batch_id not in broker.asked:
                    await asyncio.sleep(0)
                actor.do(*state.trained(batch.batch_id, 1, {}, "", 2.0))
                await pumping
        return state

    assert asyncio.run(trained_meanwhile()).reasons == {RUN_ENDED: 2}


def test_a_run_whose_time_was_over_before_it_was_continued_asks_for_nothing_more(tmp_path: Path) -> None:
    run = Before(tmp_path, settings(max_steps=8))
    run.update()
    run.group(scored=False)
    with RunJournal(tmp_path / "aggregator.sqlite") as journal:
        journal.append([Evaluated(BEFORE, "late", None, at=3 * MINUTE)])
    broker = Broker()
    state = asyncio.run(goes_on(tmp_path, settings(max_steps=8, max_minutes=1), broker))
    assert state.reasons == {RUN_ENDED: 1}
    assert not broker.asked


def test_more_steps_come_too_late_once_the_last_evaluation_is_under_way(tmp_path: Path) -> None:
    run = Before(tmp_path, settings(max_steps=1, eval_samples=1))
    problems = [problem.problem_id for problem in run.state.plan.heldout]
    with RunJournal(tmp_path / "aggregator.sqlite") as journal:
        journal.append([Evaluated(BEFORE, f"{BEFORE}.{name}.0", None) for name in problems])
    run.update()
    broker = Broker()
    asyncio.run(waits(tmp_path, settings(max_steps=1, eval_samples=1), broker))
    again = Broker()
    asyncio.run(waits(tmp_path, settings(max_steps=2, eval_samples=1), again))
    assert broker.asked.keys() == again.asked.keys(), "training on would mix two policies in one evaluation"
    assert all(name.startswith(AFTER) for name in again.asked)
