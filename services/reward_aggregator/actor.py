"""The aggregator's shell: takes scored turns and trained batches, and submits what the run's state wants next.

::

    score, trained ─▶ RunState (pure) ─▶ journal ─▶ generate, train, archive, metrics
                                         the end ─▶ the learner's last version and its checkpoint are on disk
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kbrl_async.evaluation.rounds import Round
from kbrl_async.rollouts.alarms import AlarmChange
from kbrl_async.rollouts.buffer.events import BatchMade, Finished
from kbrl_async.rollouts.prompts.first import FirstPrompts
from kbrl_async.rollouts.rewards.presets import Preset, find_presets
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.runs.commands import (
    AskTurn,
    Command,
    CurriculumMoved,
    Effect,
    ForgetGroup,
    RoundStarted,
    SendBatch,
    batch_frames,
    closed_in,
)
from kbrl_async.runs.demonstrations.dataset import SftDataset
from kbrl_async.runs.planning import preset_for
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import RunState
from protocols.messages import Stage, Status, Task
from protocols.records import Purpose, TrainBatch, UpdateReport
from protocols.rollout import Record
from services.reward_aggregator.ageing import REMEMBERED, ages_by_stage
from services.reward_aggregator.guards import ADVICE, AlarmResponder, FailureGuard
from services.reward_aggregator.metrics_writer import MetricsWriter
from services.runtime.rollout_actor import Outside, RolloutActor

LOOK_S = 1.0
"""Between two looks at what the broker writes about the whole system."""
SAY_S = 15.0
"""Between two lines about what the run's end waits for."""
LAST = "last-"
"""Begins the id of the task that the learner answers when all it has made is on disk. Each start has one of its own."""


class Aggregator(RolloutActor[Command, Effect]):
    """Owns the run's state and its journal."""

    _state: RunState

    def __init__(
        self,
        outside: Outside,
        state: RunState,
        journal: RunJournal,
        metrics: MetricsWriter,
        prompts: FirstPrompts,
        demonstrations: SftDataset | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:param demonstrations: learned instead of rollouts (method=sft)."""
        super().__init__(outside, state, prompts, outside.service.config.temperature, clock)
        self._journal, self._metrics, self._demonstrations = journal, metrics, demonstrations
        self._published: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._alarms = AlarmResponder(self._config, outside.service.run_dir, self._log)
        self._failures = FailureGuard()
        self._presets = find_presets(self._config.reward, overlong=self._config.punishes_overlong)
        self._looked = clock()
        self._last_id = f"{LAST}{secrets.token_hex(4)}"
        self._is_kept = asyncio.Event()

    async def run(self, welcomes: Callable[[], int] = lambda: 1) -> None:
        """`pump`, then what the learner has made is on disk: the processes are given seconds to end, and a large
        model's weights take minutes. Not in a rehearsal, whose weights are random."""
        await self.pump(welcomes)
        version, begun = self._state.version, self._clock()
        if version == 0 or self._config.is_rehearsal:
            return
        while not await self._keeps_last(version):
            waited_s = round(self._clock() - begun)
            self._log.info("the last version is being written", policy_version=version, waited_s=waited_s)

    async def _keeps_last(self, version: int) -> bool:
        """Whether the learner says so within `SAY_S`. Asked each time: a broker that came back may have forgotten."""
        header, until = TrainBatch(self._last_id, version, self._config.temperature, []), self._clock() + SAY_S
        frames = [msgspec.msgpack.encode(header)]
        await self._outside.producer.submit(self._last_id, Stage.TRAIN, frames, self._last_id)
        while not self._is_kept.is_set() and self._clock() < until:
            self._metrics.tick(self.now)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_kept.wait(), min(LOOK_S, SAY_S))
        return self._is_kept.is_set()

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────

    async def _take(self, task: Task, frames: list[bytes]) -> None:
        await (self._trained(task, frames) if task.stage == Stage.TRAINED else super()._take(task, frames))

    def _preset(self, group_id: str) -> Preset:
        return preset_for(group_id, self._presets, self._state)

    def _noted(self, scored: ScoredTurn, record: Record) -> ScoredTurn:
        stats = self._metrics.keep_kernel(scored)
        ages = ages_by_stage(record, self._published)
        return msgspec.structs.replace(scored, stats=msgspec.structs.replace(stats, ages=ages))

    def _trace(self, record: Record, scored: ScoredTurn | None) -> None:
        self._metrics.trace(record, scored)

    def _awaits(self, group_id: str, rollout_id: str, turn: int) -> bool:
        return self._state.awaits(group_id, rollout_id, turn)

    def _scored(self, group_id: str, rollout_id: str, scored: ScoredTurn, record: Record) -> list[Command]:
        if self._manager.goes_on(record.request, scored):
            return [self._manager.taken(group_id, scored, scored.stats, record, self.now)]
        return self._state.ended(group_id, rollout_id, scored.sample, scored.stats, self.now)

    def _broken_off(self, group_id: str, rollout_id: str, reason: str) -> list[Command]:
        return self._state.broken_off(group_id, rollout_id, reason, self.now)

    async def _trained(self, task: Task, frames: list[bytes]) -> None:
        if task.task_id.startswith(LAST):
            if task.task_id == self._last_id:
                self._is_kept.set()
            if task.status != Status.OK:
                self._log.warning("the last version may not be on disk", reason=task.status)
            return
        if task.status != Status.OK:
            self._log.error("batch failed", batch=task.task_id, reason=task.status)
            self.do(*self._state.untrained(task.task_id, task.status, self.now))
            return
        report = msgspec.msgpack.decode(frames[-1], type=UpdateReport)
        version, failure = report.policy_version, report.failure
        commands = self._state.trained(report.batch_id, version, report.metrics, failure, self.now)
        if commands:  # in the archive first: else a restart in between would leave it out there
            await self._outside.recorder.updated(report)
        self.submissions.begin(self._outside.producer.retire(task.task_id))
        if not commands:
            return
        if not failure:
            self._metrics.updated(report, self._state.batch_stats(report.batch_id), self._state.counters())
            self._published.append((report.finished_at, version))
        changes = [effect for effect in self.do(*commands) if isinstance(effect, AlarmChange)]
        self._alarms.respond(changes, self._state.alarms_raised, report, frames[:-1])

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────

    def do(self, *commands: Command) -> list[Effect]:
        if any(isinstance(command, Finished) for command in commands) and not self._state.has_all_updates:
            minutes = self._config.max_minutes
            self._log.info("time is up", minutes=minutes, shown=f"time is up after {minutes:g} minutes")
        effects = super().do(*commands)
        self._metrics.note(commands)
        return effects

    def _ended_groups(self, effects: Sequence[Effect]) -> list[str]:
        return [group.group_id for group in closed_in(effects)]

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        self._close(effects)
        for effect in effects:
            match effect:
                case AskTurn():
                    self._ask(effect)
                case SendBatch():
                    self._train(effect.batch)
                case ForgetGroup():
                    self.submissions.begin(self._outside.producer.retire(effect.group_id))
                case CurriculumMoved():
                    self._log.info("curriculum", change=effect.change, shown=f"curriculum: {effect.change}")
                case RoundStarted():
                    self._metrics.round_begun(effect.version)
                case Round():
                    self._metrics.evaluated(effect)
                case _:
                    pass  # ends of groups were taken together; alarms are answered where the batch is at hand

    def _close(self, effects: Sequence[Effect]) -> None:
        closed = closed_in(effects)
        if not closed:
            return
        self.submissions.begin(self._outside.recorder.ended(closed, self.now))
        for group in closed:
            self._log.debug("group ended", group=group.group_id, outcome=group.outcome, reason=group.reason)
            self.submissions.begin(self._outside.producer.retire(group.group_id))
        if untaught := self._failures.note(closed):
            self._log.warning("no group teaches anything", in_a_row=untaught, advice=ADVICE)

    def _ask(self, ask: AskTurn) -> None:
        """A rollout's turn is asked for, or it is a demonstration and done (method=sft)."""
        rollout_id, group_id, problem, purpose = ask
        if self._demonstrations is None or purpose is not Purpose.TRAIN:
            self._generate(rollout_id, group_id, problem, purpose, self._state.version)
            return
        samples = self._demonstrations.samples(rollout_id, self._state.group_version(group_id) or 0)
        self.do(*self._state.learned(group_id, rollout_id, samples, self.now))

    def _train(self, batch: BatchMade) -> None:
        header = TrainBatch(batch.batch_id, batch.index, self._config.temperature, batch.group_ids)
        groups = self._state.train_groups(batch.batch_id)
        self.submissions.begin(self._outside.recorder.batch(batch, groups))
        frames = [msgspec.msgpack.encode(header), *batch_frames(groups)]
        self.submissions.begin(self._outside.producer.submit(batch.batch_id, Stage.TRAIN, frames, batch.batch_id))

    def _begin(self) -> None:
        if self._state.is_finished and not self._state.has_ended:
            self._log.info("training is over already; a limit that was raised since comes too late")
        if isinstance(command := self._state.due(self.now), Finished):
            self.do(command)  # at limits that are lower than before: what waits for a batch is not asked for again

    def _look(self) -> None:
        self._journal.compact_if_due(self._state)
        if self._clock() - self._looked >= LOOK_S:
            self._looked = self._clock()
            self._metrics.tick(self.now)
