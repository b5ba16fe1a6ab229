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
import contextlib
import time
from collections import deque
from collections.abc import Callable

import msgspec

from kbrl_async.rollouts.alarms import NON_FINITE
from kbrl_async.rollouts.buffer.buffer import rollout_ids
from kbrl_async.rollouts.buffer.events import Admitted, BatchMade, Change
from kbrl_async.rollouts.turns import split_turn_id, turn_id, with_returns
from kbrl_async.runs.telemetry.logs import bound
from kbrl_async.runs.telemetry.training_metrics import RolloutStats
from protocols.messages import Stage, Status, Task
from protocols.records import (
    Problem,
    Purpose,
    SamplingParams,
    TrainBatch,
    TrainSample,
    UpdateReport,
)
from protocols.rollout import Record
from services.reward_aggregator.ageing import REMEMBERED, ages_by_stage
from services.reward_aggregator.alarming import AlarmAction, watched
from services.reward_aggregator.archiving import Archiving
from services.reward_aggregator.failure_guard import ADVICE, FailureGuard
from services.reward_aggregator.journal import Journal
from services.reward_aggregator.metrics_writer import MetricsWriter
from services.reward_aggregator.planning import preset_for, presets_of
from services.reward_aggregator.rounds import RoundBegun, group_of_round
from services.reward_aggregator.run_state import (
    AFTER,
    BEFORE,
    Entry,
    Evaluated,
    RolloutEnded,
    RunState,
    batch_frames,
    is_evaluation,
)
from services.reward_aggregator.sft_dataset import SftDataset
from services.rollouts.examples import FirstPrompts
from services.rollouts.manager import RolloutManager
from services.rollouts.scoring import Scored, received
from services.rollouts.trajectories import best_turn
from services.runtime.producer import Producer
from services.runtime.service import Service
from services.runtime.submissions import Submissions
from services.runtime.worker import Outcome

IDLE_S = 0.5
"""The pump looks at deadlines at least this often."""
LOOK_S = 1.0
"""Between two looks at what the broker writes about the whole system."""


class Aggregator:
    """Owns the campaign and its journal; `handle` is the worker's handler, `pump` the loop that submits."""

    def __init__(
        self,
        service: Service,
        campaign: RunState,
        journal: Journal,
        producer: Producer,
        board: MetricsWriter,
        archive: Archiving,
        clock: Callable[[], float] = time.monotonic,
        prompts: FirstPrompts | None = None,
        lessons: SftDataset | None = None,
    ) -> None:
        self._service = service
        self._lessons = lessons
        self._config = service.config
        self._campaign = campaign
        self._journal = journal
        self._producer = producer
        self._board = board
        self._archive = archive
        self._published: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._response = AlarmAction(service.config, service.run_dir, service.log)
        self._futility = FailureGuard()
        self._presets = presets_of(self._config)
        first = prompts or FirstPrompts(self._config.prompt_option, self._config.backend)
        sampling = SamplingParams(self._config.max_tokens, self._config.temperature)
        self._conductor = RolloutManager(self._config, campaign.dialogues, first, sampling)
        self._started = clock() - campaign.clock
        self._clock = clock
        self._looked = clock()
        self._wake = asyncio.Event()
        self._asked: set[str] = set()
        self._retired = False
        self._submissions = Submissions(self._wake)
        self.welcomes: Callable[[], int] = lambda: 0
        """How often the broker has taken this process in."""
        self._welcomes = 1

    @property
    def now(self) -> float:
        return self._clock() - self._started

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, task: Task, frames: list[bytes]) -> Outcome:
        with bound(task_id=task.task_id, group_id=task.group_id):
            if task.stage == Stage.TRAINED:
                await self._trained(task, frames)
            else:
                await self._scored(task, frames)
        self._wake.set()
        return Outcome()

    async def _scored(self, task: Task, frames: list[bytes]) -> None:
        rollout_id, turn = split_turn_id(task.task_id)
        if turn != len(self._campaign.dialogues.turns(rollout_id)):
            return  # a late copy of a turn that was taken long ago
        record = received(frames, task.status)
        preset = preset_for(task.group_id, self._presets, self._campaign)
        scored = self._conductor.score(rollout_id, record, preset)
        stats = self._board.keep_kernel(scored) if scored is not None else None
        if stats is not None:
            stats = msgspec.structs.replace(stats, ages=ages_by_stage(record, self._published))
        is_best = stats is not None and bool(stats.file)
        await self._archive.scored(task, frames, record, scored, self.now, is_best=is_best)
        self._board.trace(record, scored)
        if not self._awaits(task.group_id, rollout_id, turn):
            return  # while the archive wrote, the group ended, or a copy of the turn was taken
        if scored is None or stats is None:
            self._broken_off(task, rollout_id, record)
            return
        self._conductor.prompts.learn(record.request, scored)
        if self._conductor.goes_on(rollout_id, scored):
            self._take_turn(task.group_id, scored, stats, record)
        elif is_evaluation(task.group_id):
            self._evaluated(task.group_id, rollout_id, stats)
        else:
            self._end_rollout(task.group_id, rollout_id, [scored.sample], stats)
        self._service.log.debug("scored", reward=round(scored.sample.reward, 3), fault=scored.fault, turn=turn)

    def _awaits(self, group_id: str, rollout_id: str, turn: int) -> bool:
        is_open = is_evaluation(group_id) or self._campaign.book.group_version(group_id) is not None
        return is_open and turn == len(self._campaign.dialogues.turns(rollout_id))

    def _take_turn(self, group_id: str, scored: Scored, stats: RolloutStats, record: Record) -> None:
        entry = self._conductor.taken(group_id, scored, stats, record, self.now)
        self._campaign.apply(entry)
        self._journal.append([entry])
        self._generate(entry.rollout_id, group_id, record.request.problem, record.request.purpose)

    def _evaluated(self, phase: str, rollout_id: str, last: RolloutStats | None) -> None:
        """A held-out rollout ended; with several turns its best one counts."""
        turns = [*(t.stats for t in self._campaign.dialogues.turns(rollout_id)), *([last] if last else [])]
        entry = Evaluated(phase, rollout_id, best_turn(turns) if turns else None, self.now)
        rounds = len(self._campaign.rounds.ended)
        self._campaign.apply(entry)
        self._journal.append([entry])
        for done in self._campaign.rounds.ended[rounds:]:
            self._board.evaluated(done)
            self._submissions.begin(self._producer.retire(group_of_round(done.version)))

    def _end_rollout(
        self, group_id: str, rollout_id: str, last: list[TrainSample], stats: RolloutStats | None = None
    ) -> None:
        earlier = [t.sample for t in self._campaign.dialogues.turns(rollout_id)]
        samples = with_returns([*earlier, *last], self._conductor.options)
        change = self._campaign.book.scored(group_id, rollout_id, samples, self.now)
        self._change(change, *([RolloutEnded(rollout_id, group_id, stats)] if stats else []))

    def _broken_off(self, task: Task, rollout_id: str, record: Record) -> None:
        """Infrastructure failed (I4): the turns before this one count, the rollout goes no further."""
        if is_evaluation(task.group_id):
            self._evaluated(task.group_id, rollout_id, None)
        elif self._campaign.dialogues.turns(rollout_id):
            self._end_rollout(task.group_id, rollout_id, [])
        else:
            self._change(self._campaign.book.lost(task.group_id, rollout_id, record.lost_because, self.now))

    async def _trained(self, task: Task, frames: list[bytes]) -> None:
        if task.status != Status.OK:
            self._service.log.error("batch failed", batch=task.task_id, reason=task.status)
            self._change(self._campaign.book.batch_failed(task.task_id, task.status, self.now))
            return
        report = msgspec.msgpack.decode(frames[-1], type=UpdateReport)
        await self._archive.updated(report)
        book, now = self._campaign.book, self.now
        batch = next((b for b in book.outstanding() if b.batch_id == report.batch_id), None)
        self._submissions.begin(self._producer.retire(task.task_id))
        if batch is None:
            return
        if report.failure:
            change = book.batch_failed(report.batch_id, NON_FINITE, now)
        else:
            self._board.updated(report, self._campaign.batch_stats(batch), self._campaign.counters())
            change = book.trained(report.batch_id, report.policy_version, now)
            self._published.append((report.finished_at, report.policy_version))
        seen = len(self._campaign.alarm_changes)
        self._change(change, watched(report, self._campaign.alarms, now))
        changes = self._campaign.alarm_changes[seen:]
        self._response.respond(changes, self._campaign.alarms, report, frames[:-1])

    def _change(self, change: Change, *more: Entry) -> None:
        """Journals a change of the book and what belongs to it; nothing where the book ignored the call."""
        if change.event is None:
            return
        for entry in more:
            self._campaign.apply(entry)
        seen = len(self._campaign.notes)
        self._campaign.note(change.event, change.closed)
        for note in self._campaign.notes[seen:]:
            self._service.log.info("curriculum", change=note)
        self._journal.append([*more, change.event], [group.group_id for group in change.closed])
        self._submissions.begin(self._archive.ended(change.closed, self.now))
        for group in change.closed:
            self._service.log.debug("group ended", group=group.group_id, outcome=group.outcome, reason=group.reason)
            self._submissions.begin(self._producer.retire(group.group_id))
        if untaught := self._futility.note(change.closed):
            self._service.log.warning("no group teaches anything", in_a_row=untaught, advice=ADVICE)

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────

    async def pump(self) -> None:
        """Runs until the campaign has ended. Raises what a submission raised."""
        if self._campaign.book.is_finished and not self._campaign.has_ended:
            self._service.log.info("training is over already; a limit that was raised since comes too late")
        self._end_training()
        self._resubmit()
        while not self._campaign.has_ended:
            self._catch_up()
            self._advance()
            self._journal.compact_if_due(self._campaign)
            self._look_at_the_system()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), IDLE_S)
            self._submissions.check()
        await self._submissions.finish()

    def _look_at_the_system(self) -> None:
        """Now and then, however busy the pump is."""
        if self._clock() - self._looked >= LOOK_S:
            self._looked = self._clock()
            self._board.tick()

    def _end_training(self) -> None:
        """At the run's limits, which may be lower than before a restart: what waits for a batch then waits no more.

        Journaled, so that a limit that is raised during the last evaluation does not mix two policies in it.
        """
        book, limit = self._campaign.book, self._config.max_minutes
        if book.is_finished:
            return
        begun = self._campaign.first_result
        if limit is not None and begun is not None and self.now - begun > 60 * limit:
            self._service.log.info("time is up", minutes=limit)
        elif not self._campaign.has_all_updates:
            return
        self._change(book.finish(self.now))

    def _advance(self) -> None:
        self._end_training()
        book = self._campaign.book
        while book.room() > 0:
            self._admit()
        while self._campaign.may_train and self._poll():
            pass
        if self._campaign.has_trained:
            self._evaluate(AFTER)
        self._run_rounds()

    def _run_rounds(self) -> None:
        """The evaluation that goes on beside training; it ends where training has ended."""
        rounds = self._campaign.rounds
        if self._campaign.has_trained:
            if rounds.running is not None and not self._retired:
                self._retired = True
                self._submissions.begin(self._producer.retire(group_of_round(rounds.running)))
            return
        if (version := rounds.due(self._campaign.book.version)) is not None:
            entry = RoundBegun(version, self.now)
            self._campaign.apply(entry)
            self._journal.append([entry])
            self._board.round_begun(version)
        for rollout_id, problem in rounds.wanted().items():
            if rollout_id not in self._asked:
                self._asked.add(rollout_id)
                self._generate(rollout_id, group_of_round(rounds.running or 0), problem, Purpose.EVAL)

    def _admit(self) -> None:
        problem = self._campaign.next_problem(self.now)
        size = self._campaign.plan.group_size
        change = self._campaign.book.admit(problem.problem_id, problem.level, size, self.now)
        assert isinstance(change.event, Admitted), "room was asked for first"
        self._change(change)
        for rollout_id in rollout_ids(change.event.group_id, size):
            self._begin(rollout_id, change.event.group_id, problem)

    def _poll(self) -> bool:
        change = self._campaign.book.poll(self.now)
        self._change(change)
        if isinstance(change.event, BatchMade):
            self._train(change.event)
        return change.event is not None

    def _catch_up(self) -> None:
        """A broker that has come back may lack its last moments (a power cut): what is open is submitted again."""
        if self.welcomes() > self._welcomes:
            self._welcomes = self.welcomes()
            self._asked.clear()
            self._resubmit()

    def _resubmit(self) -> None:
        """All that is open, after a start or a restart: what the broker knows already it ignores."""
        self._evaluate(BEFORE)
        book = self._campaign.book
        for group_id, rollouts in book.open_rollouts().items():
            problem = self._campaign.problem(book.group_problem(group_id))
            for rollout_id in rollouts:
                self._begin(rollout_id, group_id, problem)
        for batch in book.outstanding():
            self._train(batch)

    def _evaluate(self, phase: str) -> None:
        for rollout_id, problem in self._campaign.awaited(phase).items():
            if rollout_id not in self._asked:
                self._asked.add(rollout_id)
                self._generate(rollout_id, phase, problem, Purpose.EVAL)

    def _begin(self, rollout_id: str, group_id: str, problem: Problem) -> None:
        """A training rollout is asked for, or is a lesson and done (method=sft)."""
        if self._lessons is None:
            self._generate(rollout_id, group_id, problem, Purpose.TRAIN)
            return
        book = self._campaign.book
        samples = self._lessons.samples(rollout_id, book.group_version(group_id) or 0)
        self._change(book.scored(group_id, rollout_id, samples, self.now))

    def _generate(self, rollout_id: str, group_id: str, problem: Problem, purpose: Purpose) -> None:
        request = self._conductor.request(rollout_id, group_id, problem, purpose, self._campaign.book.version)
        max_lag = self._config.max_staleness if purpose is Purpose.TRAIN else -1
        frames = [msgspec.msgpack.encode(request)]
        task_id = turn_id(rollout_id, request.turn)
        needs = self._config.backend
        self._submissions.begin(self._producer.submit(task_id, Stage.GENERATE, frames, group_id, max_lag, needs))

    def _train(self, batch: BatchMade) -> None:
        header = TrainBatch(batch.batch_id, batch.index, self._config.temperature, batch.group_ids)
        groups = self._campaign.book.train_groups(batch.batch_id)
        self._submissions.begin(self._archive.batch(batch, groups))
        frames = [msgspec.msgpack.encode(header), *batch_frames(groups)]
        self._submissions.begin(self._producer.submit(batch.batch_id, Stage.TRAIN, frames, batch.batch_id))
