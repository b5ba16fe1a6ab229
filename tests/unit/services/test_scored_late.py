"""What happens to a turn while the archive writes it; and what goes on however many turns there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.rollouts.buffer.buffer import rollout_ids
from kbrl_async.rollouts.turns import turn_id
from kbrl_async.runs.archive.recorder import RolloutRecorder
from kbrl_async.runs.config import Config
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import RunState
from protocols.messages import Stage, Task
from services.reward_aggregator import actor as aggregating
from services.reward_aggregator.actor import Aggregator
from services.reward_aggregator.metrics_writer import MetricsWriter
from services.runtime import rollout_actor
from tests.records import record
from tests.unit.services.test_catching_up import PATIENCE_S, Silent, aggregator, service
from tests.unit.services.test_limits import settings

Meanwhile = Callable[[Aggregator, RunState], None]


class Slow(RolloutRecorder):
    """Something happens while it writes."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    async def scored(self, *given: Any, **named: Any) -> None:
        await super().scored(*given, **named)
        self.meanwhile()


async def first_turn(folder: Path, config: Config, meanwhile: Meanwhile) -> tuple[RunState, str]:
    """The first answer of a group is scored, and `meanwhile` happens before that is written."""
    frame, state = service("reward_aggregator", folder, config), RunState(plan_of(config))
    with RunJournal(folder / "aggregator.sqlite") as journal, Slow(config.archive, folder) as recorder:
        actor = aggregator(frame, state, journal, Silent(), recorder)
        opened = state.admission(1.0)
        assert opened is not None
        state.do(opened)
        problem = next(p for p in state.plan.training if p.problem_id == opened.problem_id)
        rollout_id = rollout_ids(opened.group_id, 2)[0]
        recorder.meanwhile = lambda: meanwhile(actor, state)
        task = Task(turn_id(rollout_id, 0), "1:1", Stage.SCORE, 1, 60.0, 0, group_id=opened.group_id)
        await actor.handle(task, record(rollout_id, problem=problem).encode())
        await actor.submissions.finish()
    return state, rollout_id


@pytest.mark.parametrize("mode", ["multi_turn", "agents"])
def test_a_group_that_ended_meanwhile_gets_no_further_turn(tmp_path: Path, mode: str) -> None:
    def ends(actor: Aggregator, state: RunState) -> None:
        finished = state.finish(2.0)
        assert finished is not None
        actor.do(finished)

    state, rollout_id = asyncio.run(first_turn(tmp_path, settings(mode=mode), ends))
    assert not state.turns(rollout_id)
    assert state.open_work() == []


def test_one_that_is_open_still_gets_it(tmp_path: Path) -> None:
    state, rollout_id = asyncio.run(first_turn(tmp_path, settings(mode="multi_turn"), lambda *_: None))
    assert len(state.turns(rollout_id)) == 1


def test_the_system_is_looked_at_though_results_never_cease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregating, "LOOK_S", 0.05)
    monkeypatch.setattr(rollout_actor, "IDLE_S", PATIENCE_S)
    config = settings()
    frame, state = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
    looks: list[int] = []

    async def busy() -> None:
        with (
            RunJournal(tmp_path / "aggregator.sqlite") as journal,
            RolloutRecorder(config.archive, tmp_path) as recorder,
        ):
            metrics = MetricsWriter(frame, state)
            monkeypatch.setattr(metrics, "tick", lambda _: looks.append(1))
            actor = aggregator(frame, state, journal, Silent(), recorder, metrics)
            pumping = asyncio.ensure_future(actor.pump())
            async with asyncio.timeout(PATIENCE_S):
                while len(looks) < 3:
                    actor.woken.set()
                    await asyncio.sleep(0)
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    asyncio.run(busy())
