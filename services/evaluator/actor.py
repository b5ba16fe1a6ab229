"""The evaluator's shell: takes scored turns, asks for the next one, problem by problem.

::

    score ─▶ Course (pure) ─▶ journal ─▶ generate, the next problem when there is room, retire what expired

A stop uses up nobody's deadline: time is the evaluation's own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kbrl_async.evaluation.course import AskAnswer, Command, Course, Effect, Ended, Expired, Tried
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.funnel.records import result_of
from kbrl_async.rollouts.prompts.first import FirstPrompts
from kbrl_async.rollouts.rewards.presets import Preset, find_presets
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.runs.telemetry.progress import EVALUATION, Reporter
from protocols.records import Purpose
from protocols.rollout import Record
from services.runtime.rollout_actor import Outside, RolloutActor


class Evaluator(RolloutActor[Command, Effect]):
    """Owns the course and its journal."""

    _state: Course

    def __init__(
        self, outside: Outside, course: Course, prompts: FirstPrompts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        config = outside.service.config
        wanted = config.evaluation.temperature
        super().__init__(outside, course, prompts, config.temperature if wanted is None else wanted, clock)
        presets = find_presets(config.reward, overlong=config.punishes_overlong)
        self._reward_preset = presets[-1]  # of auto, what it ends at
        self._reporter = Reporter(outside.service.run_dir, self._log)

    # ── what comes in ─────────────────────────────────────────────────────────────────────────────────────────

    def _preset(self, group_id: str) -> Preset:
        return self._reward_preset

    def _awaits(self, group_id: str, rollout_id: str, turn: int) -> bool:
        return self._state.awaits(rollout_id, turn)

    def _scored(self, group_id: str, rollout_id: str, scored: ScoredTurn, record: Record) -> list[Command]:
        device = "cuda" if runs_on_gpu(self._config.backend) else "cpu"
        tried = Tried(rollout_id, scored.stats, result_of(record, device), record.source, self.now)
        if self._manager.goes_on(record.request, scored):
            return [tried, self._manager.taken(group_id, scored, scored.stats, record, self.now)]
        return [tried, Ended(rollout_id, self.now)]

    def _broken_off(self, group_id: str, rollout_id: str, reason: str) -> list[Command]:
        self._log.warning("no verdict", reason=reason)
        return [Ended(rollout_id, self.now, reason)]

    # ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────

    def do(self, *commands: Command) -> list[Effect]:
        for command in commands:
            if isinstance(command, Expired):
                self._log.warning("time is up", problem=command.problem_id, seconds=self._state.deadline_s)
        return super().do(*commands)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, AskAnswer):
                self._generate(effect.rollout_id, effect.group_id, effect.problem, Purpose.EVAL, 0)
            else:
                self.submissions.begin(self._outside.producer.retire(effect.group_id))

    def _look(self) -> None:
        """Says how far it is, once there are answers: what came before them is not the evaluation's pace."""
        course = self._state
        correct = sum(kept.sample.correct for kept in course.kept.values())
        note = f"{course.done} of {course.total} answers, {correct} correct"
        self._reporter.tell(EVALUATION, note, course.done / max(1, course.total))
