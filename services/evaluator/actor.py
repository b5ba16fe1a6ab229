"""The evaluator's shell: takes scored records, journals, asks for the next turn, problem by problem.

::

    score ─▶ course (pure) ─▶ journal ─▶ pump: expire · begin the next problem ─▶ generate

Invariants
* Journal first, then submit. A submission is idempotent by its task id, so after a crash all that is open is submitted
  again and nothing is done twice.
* Time is the evaluation's own clock: seconds of running, summed over restarts. A stop uses up nobody's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.funnel.records import result_of
from kbrl_async.rollouts.rewards.presets import find_preset
from kbrl_async.rollouts.turns import split_turn_id, turn_id
from kbrl_async.runs.telemetry.logs import bound
from protocols.messages import Stage, Task
from protocols.records import Problem, Purpose, SamplingParams
from protocols.rollout import Record
from services.evaluator.course import Begun, Course, Ended, Entry, Expired, Tried
from services.rollouts.archiving import TurnArchive
from services.rollouts.examples import FirstPrompts
from services.rollouts.journal import EntryJournal
from services.rollouts.manager import RolloutManager
from services.rollouts.scoring import Scored, received
from services.runtime.producer import Producer
from services.runtime.service import Service
from services.runtime.submissions import Submissions
from services.runtime.worker import Outcome

IDLE_S = 0.5
"""The pump looks at deadlines at least this often."""
TELL_S = 5.0
"""Least time between two lines about the progress."""
LAST_STAGE = "stage3"
"""What reward_preset=auto ends at."""


class Evaluator:
    """Owns the course and its journal; `handle` is the worker's handler, `pump` the loop that submits."""

    def __init__(
        self,
        service: Service,
        course: Course,
        journal: EntryJournal[Entry],
        producer: Producer,
        archive: TurnArchive,
        prompts: FirstPrompts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service, self._course, self._journal = service, course, journal
        self._producer, self._archive, self._clock = producer, archive, clock
        config = service.config
        builder, wanted = config.dataset_builder, config.evaluation.temperature
        named = LAST_STAGE if builder.reward_preset == "auto" else builder.reward_preset
        self._preset = find_preset(named, builder.reward_weights)
        sampling = SamplingParams(config.max_tokens, config.temperature if wanted is None else wanted)
        self._conductor = RolloutManager(config, course.dialogues, prompts, sampling)
        self._started = clock() - course.clock
        self._wake = asyncio.Event()
        self._submissions = Submissions(self._wake)
        self.welcomes: Callable[[], int] = lambda: 0
        """How often the broker has taken this process in."""
        self._welcomes = 1
        self._told = (-1, -TELL_S)

    @property
    def now(self) -> float:
        return self._clock() - self._started

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, task: Task, frames: list[bytes]) -> Outcome:
        rollout_id, turn = split_turn_id(task.task_id)
        is_open = rollout_id in self._course.open_rollouts()
        if is_open and turn == self._course.turns(rollout_id):
            with bound(task_id=task.task_id, group_id=task.group_id):
                await self._scored(task, rollout_id, turn, frames)
            self._wake.set()
        return Outcome()

    async def _scored(self, task: Task, rollout_id: str, turn: int, frames: list[bytes]) -> None:
        record = received(frames, task.status)
        scored = self._conductor.score(rollout_id, record, self._preset)
        await self._archive.scored(task, frames, record, scored, self.now)
        if rollout_id not in self._course.open_rollouts() or turn != self._course.turns(rollout_id):
            return  # its deadline passed, or a copy of it was taken, while the archive wrote
        if scored is None:
            self._note(Ended(rollout_id, self.now, record.lost_because))
            self._service.log.warning("no verdict", reason=record.lost_because)
            return
        tried = self._tried(rollout_id, scored, record)
        if self._conductor.goes_on(rollout_id, scored):
            self._note(tried, self._conductor.taken(task.group_id, scored, scored.stats, record, self.now))
            self._generate(rollout_id, self._course.problems[self._course.open_rollouts()[rollout_id]])
        else:
            self._note(tried, Ended(rollout_id, self.now))
        self._service.log.debug("scored", reward=round(scored.sample.reward, 3), fault=scored.fault, turn=turn)

    def _tried(self, rollout_id: str, scored: Scored, record: Record) -> Tried:
        device = "cuda" if runs_on_gpu(self._service.config.backend) else "cpu"
        return Tried(rollout_id, scored.stats, result_of(record, device), record.source, self.now)

    def _note(self, *entries: Entry) -> None:
        self._journal.append(entries)
        for entry in entries:
            self._course.apply(entry)

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────

    async def pump(self) -> None:
        """Runs until every sample has ended. Raises what a submission raised."""
        self._resubmit()
        while not self._course.has_ended:
            if self.welcomes() > self._welcomes:  # the broker was away, and may lack its last moments (a power cut)
                self._welcomes = self.welcomes()
                self._resubmit()
            self._advance()
            self._tell()
            self._wake.clear()
            if self._course.has_ended:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), IDLE_S)
            self._submissions.check()
        self._tell(at_once=True)
        await self._submissions.finish()

    def _resubmit(self) -> None:
        """All that is open; what the broker knows already it ignores."""
        for rollout_id, problem_id in dict(self._course.open_rollouts()).items():
            self._generate(rollout_id, self._course.problems[problem_id])

    def _advance(self) -> None:
        for problem_id in self._course.overdue(self.now):
            self._service.log.warning("time is up", problem=problem_id, seconds=self._course.deadline_s)
            self._note(Expired(problem_id, self.now))
            self._submissions.begin(self._producer.retire(_group(problem_id)))
        while (problem := self._course.next_problem()) is not None:
            self._note(Begun(problem.problem_id, self.now))
            for rollout_id in self._course.rollouts(problem.problem_id):
                self._generate(rollout_id, problem)

    def _generate(self, rollout_id: str, problem: Problem) -> None:
        group_id = _group(problem.problem_id)
        request = self._conductor.request(rollout_id, group_id, problem, Purpose.EVAL, 0)
        frames = [msgspec.msgpack.encode(request)]
        task_id, needs = turn_id(rollout_id, request.turn), self._service.config.backend
        self._submissions.begin(self._producer.submit(task_id, Stage.GENERATE, frames, group_id, -1, needs))

    def _tell(self, *, at_once: bool = False) -> None:
        """A line now and then."""
        done, when = self._told
        if self._course.done == done or (self.now - when < TELL_S and not at_once):
            return
        self._told = (self._course.done, self.now)
        kept = [kept.sample for kept in self._course.kept.values()]
        correct = sum(sample.correct for sample in kept)
        self._service.log.info(
            "progress",
            done=f"{self._course.done}/{self._course.total}",
            compiled=sum(sample.compiled for sample in kept),
            correct=correct,
            seconds=round(self.now),
        )


def _group(problem_id: str) -> str:
    return f"eval.{problem_id}"
