"""How a rollout is conducted, in training and in evaluation alike: its requests, a turn's score, and the turn after it.

::

    request ─▶ … the queues … ─▶ record ─score─▶ Scored ─ goes_on? ─ yes ─▶ taken (journaled) ─▶ the next request
                                                                 └─ no ──▶ the rollout has ended
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from kbrl_async.rollouts.prompts import Feedback, feedback_of, render_prompt
from kbrl_async.rollouts.prompts.roles import render_verifier, role_of
from kbrl_async.rollouts.rewards.presets import Preset
from kbrl_async.rollouts.turns import goes_on
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.telemetry.training_metrics import RolloutStats
from protocols.records import SOLVER, VERIFIER, Problem, Purpose, RolloutRequest, SamplingParams
from protocols.rollout import Record
from services.rollouts import trajectories as turns_between
from services.rollouts.examples import FirstPrompt, FirstPrompts
from services.rollouts.scoring import Scored, score, score_prediction, turn_options
from services.rollouts.trajectories import Trajectories, TurnTaken


class RolloutManager:
    """The rules of a run's rollouts. It reads the dialogues and never changes them: a `TurnTaken` is the change."""

    def __init__(
        self,
        config: Config,
        dialogues: Trajectories,
        prompts: FirstPrompts,
        sampling: SamplingParams,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._dialogues, self.prompts = config, dialogues, prompts
        self._sampling, self._wall_clock = sampling, wall_clock
        self.options = turn_options(config)

    def request(
        self, rollout_id: str, group_id: str, problem: Problem, purpose: Purpose, version: int
    ) -> RolloutRequest:
        """The rollout's next turn: its first one, or the one that the last turn's feedback leads to."""
        taken = self._dialogues.turns(rollout_id)
        first = FirstPrompt(taken[-1].prompt) if taken else self.prompts.make(problem, purpose)
        return RolloutRequest(
            rollout_id,
            group_id,
            problem,
            first.text,
            self._config.backend,
            self._sampling,
            purpose,
            len(taken),
            admitted_version=version,
            admitted_at=self._wall_clock(),
            role=role_of(len(taken)) if self._config.mode == "agents" else SOLVER,
            examples=first.examples,
            index_version=first.version,
        )

    def score(self, rollout_id: str, record: Record, preset: Preset) -> Scored | None:
        """What the newest turn is worth; None where infrastructure failed (I4)."""
        taken = self._dialogues.turns(rollout_id)
        is_prediction = self._config.mode == "agents" and role_of(len(taken)) == VERIFIER
        return score_prediction(record, taken[-1].category) if is_prediction else score(record, preset)

    def goes_on(self, rollout_id: str, scored: Scored) -> bool:
        scores = [*(turn.score for turn in self._dialogues.turns(rollout_id)), scored.turn_score]
        return goes_on(scores, self.options)

    def taken(self, group_id: str, scored: Scored, stats: RolloutStats, record: Record, now: float) -> TurnTaken:
        """The entry that a turn leaves when another one follows."""
        request, backend = record.request, self._config.backend
        feedback = feedback_of(record.verdict, record.timing, record.source, backend)
        refined = self.prompts.refined(request.problem, feedback)
        entry = TurnTaken(
            request.rollout_id, group_id, scored.sample, stats, scored.turn_score, refined, now, feedback.category
        )
        if self._config.mode == "agents":
            entry = self._for_next_role(entry, request, feedback)
        return entry if request.purpose is Purpose.TRAIN else turns_between.without_tokens(entry, keep_prompt=True)

    def _for_next_role(self, entry: TurnTaken, request: RolloutRequest, feedback: Feedback) -> TurnTaken:
        """What the verifier, or the corrector, is asked after this turn (mode=agents)."""
        if request.role != VERIFIER:
            question = render_verifier(self._config.prompt_option, request.problem, feedback.kernel)
            has_failed = feedback.category not in ("slow", "fast")
            return msgspec.structs.replace(entry, prompt=question, repair=entry.prompt if has_failed else "")
        judged = self._dialogues.turns(request.rollout_id)[-1]
        failed = self._dialogues.failure_of_another(request.rollout_id, request.problem.problem_id)
        first = render_prompt(self._config.prompt_option, request.problem, self._config.backend)
        return msgspec.structs.replace(entry, prompt=failed or judged.repair or first, category="")
