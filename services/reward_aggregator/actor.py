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

from kbrl_async.prompts import Feedback, feedback_of, render_prompt, render_turn
from kbrl_async.prompts.roles import SOLVER, VERIFIER, render_verifier, role_of
from kbrl_async.rewards.curriculum import STAGES
from kbrl_async.rewards.events import Admitted, BatchMade, Change
from kbrl_async.rewards.groups import rollout_ids
from kbrl_async.rewards.presets import Preset, find_preset
from kbrl_async.rewards.turns import goes_on, split_turn_id, turn_id, with_returns
from kbrl_async.telemetry.logs import bound
from kbrl_async.telemetry.training_metrics import RolloutStats
from protocols.messages import Stage, Status, Task
from protocols.records import (
    Frame,
    Problem,
    Purpose,
    RolloutRequest,
    SamplingParams,
    TrainBatch,
    TrainSample,
    UpdateReport,
)
from services.reward_aggregator import dialogues
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
from services.reward_aggregator.dialogues import TurnTaken, best_turn
from services.reward_aggregator.examples import FirstPrompt, FirstPrompts
from services.reward_aggregator.journal import Journal
from services.reward_aggregator.scoring import Scored, decode, score, score_prediction, turn_options
from services.runtime.producer import Producer
from services.runtime.service import Service
from services.runtime.worker import Outcome

AUTO = "auto"
"""The reward preset that goes from stage1 to stage3 by itself."""
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
        prompts: FirstPrompts | None = None,
    ) -> None:
        self._service = service
        self._config = service.config
        self._campaign = campaign
        self._journal = journal
        self._producer = producer
        self._board = board
        builder = self._config.dataset_builder
        stages = STAGES if builder.reward_preset == AUTO else (builder.reward_preset,)
        self._presets = [find_preset(stage, builder.reward_weights) for stage in stages]
        self._sampling = SamplingParams(self._config.max_tokens, self._config.temperature)
        self._turns = turn_options(self._config)
        self._prompts = prompts or FirstPrompts(self._config.prompt_option, self._config.backend)
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
        rollout_id, turn = split_turn_id(task.task_id)
        if turn != len(self._campaign.dialogues.turns(rollout_id)):
            return  # a late copy of a turn that was taken long ago
        record = decode(frames) if task.status == Status.OK else []
        scored = self._score(task.group_id, rollout_id, record) if record else None
        if scored is None:
            self._broken_off(task, rollout_id)
            return
        stats = self._board.keep_kernel(scored)
        self._prompts.learn(next(frame for frame in record if isinstance(frame, RolloutRequest)), scored)
        scores = [*(t.score for t in self._campaign.dialogues.turns(rollout_id)), scored.turn_score]
        if goes_on(scores, self._turns):
            self._take_turn(task.group_id, scored, stats, record)
        elif task.group_id in (BEFORE, AFTER):
            self._evaluated(task.group_id, rollout_id, stats)
        else:
            self._end_rollout(task.group_id, rollout_id, [scored.sample], stats)
        self._service.log.debug("scored", reward=round(scored.sample.reward, 3), fault=scored.fault, turn=turn)

    def _score(self, group_id: str, rollout_id: str, record: list[Frame]) -> Scored | None:
        taken = self._campaign.dialogues.turns(rollout_id)
        is_prediction = self._config.mode == "agents" and role_of(len(taken)) == VERIFIER
        return score_prediction(record, taken[-1].category) if is_prediction else score(record, self._preset(group_id))

    def _preset(self, group_id: str) -> Preset:
        """All rollouts of a group are paid alike, whenever they end."""
        if len(self._presets) == 1:
            return self._presets[0]
        return self._presets[STAGES.index(self._campaign.stage_of(group_id))]

    def _take_turn(self, group_id: str, scored: Scored, stats: RolloutStats, record: list[Frame]) -> None:
        request = next(frame for frame in record if isinstance(frame, RolloutRequest))
        rollout_id, sample = request.rollout_id, scored.sample
        feedback = feedback_of(record, self._config.backend)
        refined = render_turn(self._config.prompt_option, request.problem, feedback, self._config.backend)
        entry = TurnTaken(rollout_id, group_id, sample, stats, scored.turn_score, refined, self.now, feedback.category)
        if self._config.mode == "agents":
            entry = self._for_next_role(entry, request, feedback)
        entry = entry if request.purpose is Purpose.TRAIN else dialogues.without_tokens(entry, keep_prompt=True)
        self._campaign.apply(entry)
        self._journal.append([entry])
        self._generate(rollout_id, group_id, request.problem, request.purpose)

    def _for_next_role(self, entry: TurnTaken, request: RolloutRequest, feedback: Feedback) -> TurnTaken:
        """What the verifier, or the corrector, is asked after this turn (mode=agents)."""
        if request.role != VERIFIER:
            question = render_verifier(self._config.prompt_option, request.problem, feedback.kernel)
            has_failed = feedback.category not in ("slow", "fast")
            return msgspec.structs.replace(entry, prompt=question, repair=entry.prompt if has_failed else "")
        dialogues, problem_id = self._campaign.dialogues, request.problem.problem_id
        judged = dialogues.turns(request.rollout_id)[-1]
        prompt = dialogues.failure_of_another(request.rollout_id, problem_id) or judged.repair
        first = render_prompt(self._config.prompt_option, request.problem, self._config.backend)
        return msgspec.structs.replace(entry, prompt=prompt or first, category="")

    def _evaluated(self, phase: str, rollout_id: str, last: RolloutStats | None) -> None:
        """A held-out rollout ended; with several turns its best one counts."""
        turns = [*(t.stats for t in self._campaign.dialogues.turns(rollout_id)), *([last] if last else [])]
        entry = Evaluated(phase, rollout_id, best_turn(turns) if turns else None, self.now)
        self._campaign.apply(entry)
        self._journal.append([entry])

    def _end_rollout(
        self, group_id: str, rollout_id: str, last: list[TrainSample], stats: RolloutStats | None = None
    ) -> None:
        earlier = [t.sample for t in self._campaign.dialogues.turns(rollout_id)]
        samples = with_returns([*earlier, *last], self._turns)
        change = self._campaign.book.scored(group_id, rollout_id, samples, self.now)
        self._change(change, *([RolloutEnded(rollout_id, group_id, stats)] if stats else []))

    def _broken_off(self, task: Task, rollout_id: str) -> None:
        """Infrastructure failed (I4): the turns before this one count, the rollout goes no further."""
        if task.group_id in (BEFORE, AFTER):
            self._evaluated(task.group_id, rollout_id, None)
        elif self._campaign.dialogues.turns(rollout_id):
            self._end_rollout(task.group_id, rollout_id, [])
        else:
            reason = task.status if task.status != Status.OK else "infra_error"
            self._change(self._campaign.book.lost(task.group_id, rollout_id, reason, self.now))

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
        seen = len(self._campaign.notes)
        self._campaign.note(change.event, change.closed)
        for note in self._campaign.notes[seen:]:
            self._service.log.info("curriculum", change=note)
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
        """Ask for the rollout's next turn: its first one, or the one that the last turn's feedback leads to."""
        taken = self._campaign.dialogues.turns(rollout_id)
        first = FirstPrompt(taken[-1].prompt) if taken else self._prompts.make(problem, purpose)
        request = RolloutRequest(
            rollout_id,
            group_id,
            problem,
            first.text,
            self._config.backend,
            self._sampling,
            purpose,
            len(taken),
            admitted_version=self._campaign.book.version,
            admitted_at=time.time(),
            role=role_of(len(taken)) if self._config.mode == "agents" else SOLVER,
            examples=first.examples,
            index_version=first.version,
        )
        max_lag = self._config.max_staleness if purpose is Purpose.TRAIN else -1
        frames = [msgspec.msgpack.encode(request)]
        task_id = turn_id(rollout_id, len(taken))
        needs = self._config.backend
        self._submit(self._producer.submit(task_id, Stage.GENERATE, frames, group_id, max_lag, needs))

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
