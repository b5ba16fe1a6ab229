"""What aggregator and evaluator share: turns come in scored, commands are journaled and done, work is asked for.

::

    score ─▶ reward ─▶ archive ─▶ command ─▶ state (pure) ─▶ journal ─▶ effects: generate, train, retire, say
                                    ▲
              pump: what time brings ┘       a start, and a broker that came back: all open work is asked for again

Invariants
* Journal first, then submit. A submission is idempotent by its task id, so after a crash all that is open is submitted
  again and nothing is done twice.
* Time is the run's own clock: seconds of running, summed over restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from kbrl_async.rollouts.manager import RolloutManager
from kbrl_async.rollouts.prompts.first import FirstPrompts
from kbrl_async.rollouts.rewards.presets import Preset
from kbrl_async.rollouts.scoring import ScoredTurn, received
from kbrl_async.rollouts.trajectories import TurnTaken
from kbrl_async.rollouts.turns import split_turn_id, turn_id
from kbrl_async.runs.archive.journal import EntryJournal
from kbrl_async.runs.archive.recorder import RolloutRecorder
from kbrl_async.runs.planning import rollout_rules
from kbrl_async.runs.telemetry.logs import bound
from protocols.messages import Stage, Task
from protocols.records import Problem, Purpose, SamplingParams, Strictness
from protocols.rollout import Record
from services.runtime.producer import Producer
from services.runtime.service import Service
from services.runtime.submissions import Submissions
from services.runtime.worker import HandlerOutcome

IDLE_S = 0.5
"""The pump looks at deadlines at least this often."""

CommandT = TypeVar("CommandT")
EffectT = TypeVar("EffectT")


class StateMachine(Protocol[CommandT, EffectT]):
    """A pure state machine: `RunState`, `Course`."""

    @property
    def clock(self) -> float: ...
    @property
    def has_ended(self) -> bool: ...
    def turns(self, rollout_id: str) -> Sequence[TurnTaken]: ...
    def failure_of_another(self, rollout_id: str, problem_id: str) -> str: ...
    def strictness_of(self, group_id: str) -> Strictness | None: ...
    def due(self, now: float) -> CommandT | None: ...
    def do(self, command: CommandT) -> list[EffectT]: ...
    def open_work(self) -> list[EffectT]: ...


class Outside(NamedTuple):
    """What an actor reaches the world by."""

    service: Service
    journal: EntryJournal[Any]
    producer: Producer
    recorder: RolloutRecorder


class RolloutActor(ABC, Generic[CommandT, EffectT]):
    """`handle` is the worker's handler, `pump` the loop beside it that runs until all has ended."""

    def __init__(
        self,
        outside: Outside,
        state: StateMachine[CommandT, EffectT],
        prompts: FirstPrompts,
        temperature: float,
        clock: Callable[[], float],
    ) -> None:
        self._outside, self._state = outside, state
        self._config, self._log = outside.service.config, outside.service.log
        sampling = SamplingParams(self._config.max_tokens, temperature)
        self._manager = RolloutManager(rollout_rules(self._config), state, prompts, sampling)
        self._clock = clock
        self._started = clock() - state.clock
        self.woken = asyncio.Event()
        self.submissions = Submissions(self.woken)

    @property
    def now(self) -> float:
        return self._clock() - self._started

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, task: Task, frames: list[bytes]) -> HandlerOutcome:
        with bound(task_id=task.task_id, group_id=task.group_id):
            await self._take(task, frames)
        self.woken.set()
        return HandlerOutcome()

    async def _take(self, task: Task, frames: list[bytes]) -> None:
        """A turn came back. While the archive writes it, its group may end, or a copy of it be taken."""
        rollout_id, turn = split_turn_id(task.task_id)
        if turn != len(self._state.turns(rollout_id)):
            return  # a late copy of a turn that was taken long ago
        record = received(frames, task.status)
        scored = self._manager.score(rollout_id, record, self._preset(task.group_id))
        if scored is not None:
            scored = self._noted(scored, record)
        is_best = scored is not None and bool(scored.stats.file)
        await self._outside.recorder.scored(task, frames, record, scored, self.now, is_best=is_best)
        self._trace(record, scored)
        if not self._awaits(task.group_id, rollout_id, turn):
            return
        if scored is None:
            self.do(*self._broken_off(task.group_id, rollout_id, record.lost_because))
            return
        self._manager.learn(record, scored)
        self.do(*self._scored(task.group_id, rollout_id, scored, record))
        self._log.debug("scored", reward=round(scored.sample.reward, 3), fault=scored.fault, turn=turn)

    @abstractmethod
    def _preset(self, group_id: str) -> Preset: ...

    def _noted(self, scored: ScoredTurn, record: Record) -> ScoredTurn:
        """With what only this actor knows of the turn."""
        return scored

    def _trace(self, record: Record, scored: ScoredTurn | None) -> None:
        """Whoever follows single turns is told of this one."""

    @abstractmethod
    def _awaits(self, group_id: str, rollout_id: str, turn: int) -> bool: ...

    @abstractmethod
    def _scored(self, group_id: str, rollout_id: str, scored: ScoredTurn, record: Record) -> Sequence[CommandT]: ...

    @abstractmethod
    def _broken_off(self, group_id: str, rollout_id: str, reason: str) -> Sequence[CommandT]: ...

    # ── what is done ──────────────────────────────────────────────────────────────────────────────────────────

    def do(self, *commands: CommandT) -> list[EffectT]:
        """Each is done and journaled, then what they lead to is carried out."""
        effects = [effect for command in commands for effect in self._state.do(command)]
        if commands:
            self._outside.journal.append(commands, self._ended_groups(effects))
            self._carry_out(effects)
        return effects

    def _ended_groups(self, _effects: Sequence[EffectT]) -> list[str]:
        return []

    @abstractmethod
    def _carry_out(self, effects: Sequence[EffectT]) -> None: ...

    async def pump(self, welcomes: Callable[[], int] = lambda: 1) -> None:
        """Runs until all has ended. Raises what a submission raised.

        :param welcomes: how often the broker has taken this process in. One that has come back may lack its last
            moments (a power cut): what is open is submitted again, and it ignores what it knows.
        """
        seen = 1
        self._begin()
        self._carry_out(self._state.open_work())
        while not self._state.has_ended:
            if welcomes() > seen:
                seen = welcomes()
                self._carry_out(self._state.open_work())
            while (command := self._state.due(self.now)) is not None:
                self.do(command)
            self._look()
            self.woken.clear()
            if self._state.has_ended:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.woken.wait(), IDLE_S)
            self.submissions.check()
        await self.submissions.finish()

    def _begin(self) -> None:
        """Before anything is asked for."""

    def _look(self) -> None:
        """Each time round, however busy the pump is."""

    def _generate(self, rollout_id: str, group_id: str, problem: Problem, purpose: Purpose, version: int) -> None:
        request = self._manager.request(rollout_id, group_id, problem, purpose, version)
        max_staleness = self._config.max_staleness if purpose is Purpose.TRAIN else -1
        frames, task_id = [msgspec.msgpack.encode(request)], turn_id(rollout_id, request.turn)
        submit = self._outside.producer.submit
        self.submissions.begin(submit(task_id, Stage.GENERATE, frames, group_id, max_staleness, self._config.backend))
