"""What happens to a turn while the archive writes it; and what goes on however many turns there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.rollouts.buffer.buffer import rollout_ids
from kbrl_async.rollouts.buffer.events import Admitted
from kbrl_async.rollouts.turns import turn_id
from kbrl_async.runs.config import Config
from protocols.messages import Stage, Task
from services.reward_aggregator import actor as aggregating
from services.reward_aggregator.actor import Aggregator
from services.reward_aggregator.archiving import Archiving
from services.reward_aggregator.journal import Journal
from services.reward_aggregator.metrics_writer import MetricsWriter
from services.reward_aggregator.planning import plan_of
from services.reward_aggregator.run_state import RunState
from tests.records import record
from tests.unit.services.test_catching_up import PATIENCE_S, Silent, service
from tests.unit.services.test_limits import settings

Meanwhile = Callable[[Aggregator, RunState], None]


class Slow(Archiving):
    """Something happens while it writes."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    async def scored(self, *given: Any, **named: Any) -> None:
        await super().scored(*given, **named)
        self.meanwhile()


async def first_turn(folder: Path, config: Config, meanwhile: Meanwhile) -> tuple[RunState, str]:
    """The first answer of a group is scored, and `meanwhile` happens before that is written."""
    frame, campaign = service("reward_aggregator", folder, config), RunState(plan_of(config))
    with Journal(folder / "aggregator.sqlite") as journal, Slow(config, folder) as archive:
        actor = Aggregator(frame, campaign, journal, Silent(), MetricsWriter(frame, campaign), archive)  # type: ignore[arg-type]
        problem = campaign.plan.training[0]
        opened = campaign.book.admit(problem.problem_id, 1, 2, 1.0).event
        assert isinstance(opened, Admitted)
        rollout_id = rollout_ids(opened.group_id, 2)[0]
        archive.meanwhile = lambda: meanwhile(actor, campaign)
        task = Task(turn_id(rollout_id, 0), "1:1", Stage.SCORE, 1, 60.0, 0, group_id=opened.group_id)
        await actor.handle(task, record(rollout_id, problem=problem).encode())
        await actor._submissions.finish()
    return campaign, rollout_id


@pytest.mark.parametrize("mode", ["multi_turn", "agents"])
def test_a_group_that_ended_meanwhile_gets_no_further_turn(tmp_path: Path, mode: str) -> None:
    def ends(actor: Aggregator, campaign: RunState) -> None:
        actor._change(campaign.book.finish(2.0))

    campaign, rollout_id = asyncio.run(first_turn(tmp_path, settings(mode=mode), ends))
    assert not campaign.dialogues.turns(rollout_id)
    assert campaign.book.open_rollouts() == {}


def test_one_that_is_open_still_gets_it(tmp_path: Path) -> None:
    campaign, rollout_id = asyncio.run(first_turn(tmp_path, settings(mode="multi_turn"), lambda *_: None))
    assert len(campaign.dialogues.turns(rollout_id)) == 1


def test_the_system_is_looked_at_though_results_never_cease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregating, "LOOK_S", 0.05)
    monkeypatch.setattr(aggregating, "IDLE_S", PATIENCE_S)
    config = settings()
    frame, campaign = service("reward_aggregator", tmp_path, config), RunState(plan_of(config))
    looks: list[int] = []

    async def busy() -> None:
        with Journal(tmp_path / "aggregator.sqlite") as journal, Archiving(config, tmp_path) as archive:
            board = MetricsWriter(frame, campaign)
            monkeypatch.setattr(board, "tick", lambda: looks.append(1))
            actor = Aggregator(frame, campaign, journal, Silent(), board, archive)  # type: ignore[arg-type]
            pumping = asyncio.ensure_future(actor.pump())
            async with asyncio.timeout(PATIENCE_S):
                while len(looks) < 3:
                    actor._wake.set()
                    await asyncio.sleep(0)
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    asyncio.run(busy())
