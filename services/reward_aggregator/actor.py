"""The aggregator's shell: takes scored records and trained batches, journals, and submits what the campaign wants next.

::

    score, trained ─▶ campaign (pure) ─▶ journal ─▶ pump: close · admit · make a batch ─▶ generate, train

Invariants
* Journal first, then submit. A submission is idempotent by its task id, so after a crash all that is open is submitted
  again and nothing is done twice.
* Time is the run's own clock: seconds of running, summed over restarts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import msgspec

from kbrl_async.prompts import render_prompt
from kbrl_async.rewards.events import Admitted, BatchMade, Change
from kbrl_async.rewards.groups import rollout_ids
from kbrl_async.rewards.presets import find_preset
from kbrl_async.telemetry.logs import bound
from protocols.messages import Stage, Status, Task
from protocols.records import Problem, Purpose, RolloutRequest, SamplingParams, TrainBatch, UpdateReport
from services.reward_aggregator.board import Board
from services.reward_aggregator.campaign import (
    AFTER,
    BEFORE,
    Campaign,
    Entry,
    Evaluated,
    RolloutEnded,
    batch_frames,
)
from services.reward_aggregator.journal import Journal
from services.reward_aggregator.scoring import decode, score
from services.runtime.producer import Producer
from services.runtime.service import Service
from services.runtime.worker import Outcome

IDLE_S = 0.5
"""The pump looks at deadlines at least this often."""


class Aggregator:
    """Owns the campaign and its journal; `handle` is the worker's handler, `pump` the loop that submits."""

    def __init__(
        self,
        service: Service,
        campaign: Campaign,
        journal: Journal,
        producer: Producer,
        board: Board,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._config = service.config
        self._campaign = campaign
        self._journal = journal
        self._producer = producer
        self._board = board
        builder = self._config.dataset_builder
        self._preset = find_preset(builder.reward_preset, builder.reward_weights)
        self._sampling = SamplingParams(self._config.max_tokens, self._config.temperature)
        self._started = clock() - campaign.clock
        self._clock = clock
        self._wake = asyncio.Event()
        self._asked: set[str] = set()
        self._submissions: set[asyncio.Task[object]] = set()
        self._failure: BaseException | None = None

    @property
    def now(self) -> float:
        return self._clock() - self._started

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, task: Task, frames: list[bytes]) -> Outcome:
        with bound(task_id=task.task_id, group_id=task.group_id):
            if task.stage == Stage.TRAINED:
                self._trained(task, frames)
            else:
                self._scored(task, frames)
        self._wake.set()
        return Outcome()

    def _scored(self, task: Task, frames: list[bytes]) -> None:
        scored = score(decode(frames), self._preset) if task.status == Status.OK else None
        if task.group_id in (BEFORE, AFTER):
            stats = self._board.keep_kernel(scored) if scored else None
            evaluated = Evaluated(task.group_id, task.task_id, stats, self.now)
            self._campaign.apply(evaluated)
            self._journal.append([evaluated])
            return
        if scored is None:
            reason = task.status if task.status != Status.OK else "infra_error"
            self._change(self._campaign.book.lost(task.group_id, task.task_id, reason, self.now))
            return
        change = self._campaign.book.scored(task.group_id, task.task_id, [scored.sample], self.now)
        self._change(change, RolloutEnded(task.task_id, task.group_id, self._board.keep_kernel(scored)))
        self._service.log.debug("scored", reward=round(scored.sample.reward, 3), fault=scored.fault)

    def _trained(self, task: Task, frames: list[bytes]) -> None:
        if task.status != Status.OK:
            self._service.log.error("batch failed", batch=task.task_id, reason=task.status)
            self._change(self._campaign.book.batch_failed(task.task_id, task.status, self.now))
            return
        report = msgspec.msgpack.decode(frames[-1], type=UpdateReport)
        batch = next((b for b in self._campaign.book.outstanding() if b.batch_id == report.batch_id), None)
        if batch is not None:
            self._board.updated(report, self._campaign.batch_stats(batch), self._campaign.counters())
        self._change(self._campaign.book.trained(report.batch_id, report.policy_version, self.now))
        self._submit(self._producer.retire(task.task_id))

    def _change(self, change: Change, *more: Entry) -> None:
        """Journals a change of the book and what belongs to it; nothing where the book ignored the call."""
        if change.event is None:
            return
        for entry in more:
            self._campaign.apply(entry)
        self._campaign.note(change.event, change.closed)
        self._journal.append([*more, change.event], [group.group_id for group in change.closed])
        for group in change.closed:
            self._service.log.debug("group ended", group=group.group_id, outcome=group.outcome, reason=group.reason)
            self._submit(self._producer.retire(group.group_id))

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────

    async def pump(self) -> None:
        """Runs until the campaign has ended. Raises what a submission raised."""
        self._resubmit()
        while not self._campaign.has_ended:
            self._advance()
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), IDLE_S)
            except TimeoutError:
                self._board.tick()
            if self._failure is not None:
                raise self._failure
        await asyncio.gather(*self._submissions)

    def _advance(self) -> None:
        book, limit = self._campaign.book, self._config.max_minutes
        begun = self._campaign.first_result
        if limit is not None and begun is not None and self.now - begun > 60 * limit and not book.is_finished:
            self._service.log.info("time is up", minutes=limit)
            self._change(book.finish(self.now))
        while book.room() > 0:
            self._admit()
        while self._campaign.may_train and self._poll():
            pass
        if self._campaign.has_trained:
            self._evaluate(AFTER)

    def _admit(self) -> None:
        problem = self._campaign.next_problem(self.now)
        size = self._campaign.plan.group_size
        change = self._campaign.book.admit(problem.problem_id, problem.level, size, self.now)
        assert isinstance(change.event, Admitted), "room was asked for first"
        self._change(change)
        for rollout_id in rollout_ids(change.event.group_id, size):
            self._generate(rollout_id, change.event.group_id, problem, Purpose.TRAIN)

    def _poll(self) -> bool:
        change = self._campaign.book.poll(self.now)
        self._change(change)
        if isinstance(change.event, BatchMade):
            self._train(change.event)
        return change.event is not None

    def _resubmit(self) -> None:
        """All that is open, after a start or a restart: what the broker knows already it ignores."""
        self._evaluate(BEFORE)
        book = self._campaign.book
        for group_id, rollouts in book.open_rollouts().items():
            problem = self._campaign.problem(book.group_problem(group_id))
            for rollout_id in rollouts:
                self._generate(rollout_id, group_id, problem, Purpose.TRAIN)
        for batch in book.outstanding():
            self._train(batch)

    def _evaluate(self, phase: str) -> None:
        for rollout_id, problem in self._campaign.awaited(phase).items():
            if rollout_id not in self._asked:
                self._asked.add(rollout_id)
                self._generate(rollout_id, phase, problem, Purpose.EVAL)

    def _generate(self, rollout_id: str, group_id: str, problem: Problem, purpose: Purpose) -> None:
        request = RolloutRequest(
            rollout_id,
            group_id,
            problem,
            render_prompt(self._config.prompt_option, problem),
            self._config.backend,
            self._sampling,
            purpose,
            admitted_version=self._campaign.book.version,
            admitted_at=time.time(),
        )
        max_lag = self._config.max_staleness if purpose is Purpose.TRAIN else -1
        frames = [msgspec.msgpack.encode(request)]
        self._submit(self._producer.submit(rollout_id, Stage.GENERATE, frames, group_id, max_lag))

    def _train(self, batch: BatchMade) -> None:
        header = TrainBatch(batch.batch_id, batch.index, self._config.temperature, batch.group_ids)
        frames = [msgspec.msgpack.encode(header), *batch_frames(self._campaign.book.train_groups(batch.batch_id))]
        self._submit(self._producer.submit(batch.batch_id, Stage.TRAIN, frames, batch.batch_id))

    def _submit(self, submission: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(submission)
        self._submissions.add(task)
        task.add_done_callback(self._submitted)

    def _submitted(self, task: asyncio.Task[object]) -> None:
        self._submissions.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._wake.set()
