"""How a rollout is managed, in training and in evaluation alike: its requests, a turn's score, and the turn after it.

::

    request ─▶ … the queues … ─▶ record ─score─▶ Scored ─ goes_on? ─ yes ─▶ taken (journaled) ─▶ the next request
                                                                 └─ no ──▶ the rollout has ended
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kbrl_async.rollouts.prompts import Feedback, feedback_of, render_prompt
from kbrl_async.rollouts.prompts.first import FirstPrompt, FirstPrompts
from kbrl_async.rollouts.prompts.roles import render_verifier, role_of
from kbrl_async.rollouts.rewards.presets import Preset
from kbrl_async.rollouts.scoring import ScoredTurn, score, score_prediction
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TurnTaken, without_tokens
from kbrl_async.rollouts.turns import TurnRules, goes_on, is_single
from protocols.records import SOLVER, VERIFIER, Problem, Purpose, RolloutRequest, SamplingParams, Strictness
from protocols.rollout import Record


class RolloutRules(msgspec.Struct, frozen=True):
    """Settings of a run, under their names; `planning.rollout_rules` makes it."""

    mode: str
    backend: str
    prompt_option: str
    turns: TurnRules


class TakenTurns(Protocol):
    """What is asked of the state that the rollouts belong to."""

    def turns(self, rollout_id: str) -> Sequence[TurnTaken]: ...
    def failure_of_another(self, rollout_id: str, problem_id: str) -> str: ...
    def strictness_of(self, group_id: str) -> Strictness | None: ...


class RolloutManager:
    """The rules of a run's rollouts. It reads the turns taken and never changes them: a `TurnTaken` is the change."""

    def __init__(
        self,
        rules: RolloutRules,
        taken: TakenTurns,
        prompts: FirstPrompts,
        sampling: SamplingParams,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._rules, self._taken, self._prompts = rules, taken, prompts
        self._sampling, self._wall_clock = sampling, wall_clock

    def request(
        self, rollout_id: str, group_id: str, problem: Problem, purpose: Purpose, version: int
    ) -> RolloutRequest:
        """The rollout's next turn: its first one, or the one that the last turn's feedback leads to."""
        taken = self._taken.turns(rollout_id)
        first = FirstPrompt(taken[-1].prompt) if taken else self._prompts.make(problem, purpose)
        return RolloutRequest(
            rollout_id,
            group_id,
            problem,
            first.text,
            self._rules.backend,
            self._sampling,
            purpose,
            len(taken),
            admitted_version=version,
            admitted_at=self._wall_clock(),
            role=role_of(len(taken)) if self._rules.mode == "agents" else SOLVER,
            examples=first.examples,
            index_version=first.version,
            strictness=self._taken.strictness_of(group_id) if purpose is Purpose.TRAIN else None,
        )

    def score(self, rollout_id: str, record: Record, preset: Preset) -> ScoredTurn | None:
        """What the newest turn is worth; None where infrastructure failed (I4)."""
        taken = self._taken.turns(rollout_id)
        is_prediction = self._rules.mode == "agents" and role_of(len(taken)) == VERIFIER
        return score_prediction(record, taken[-1].category) if is_prediction else score(record, preset)

    def learn(self, record: Record, scored: ScoredTurn) -> None:
        """Prompts that show examples take in what became of this one."""
        self._prompts.learn(record.request, scored)

    def goes_on(self, request: RolloutRequest, scored: ScoredTurn) -> bool:
        if request.purpose is Purpose.TRAIN and is_single(request.group_id, self._rules.turns):
            return False
        scores = [*(turn.score for turn in self._taken.turns(request.rollout_id)), scored.turn_score]
        return goes_on(scores, self._rules.turns)

    def taken(self, group_id: str, scored: ScoredTurn, stats: RolloutStats, record: Record, now: float) -> TurnTaken:
        """The entry that a turn leaves when another one follows."""
        request = record.request
        profile = record.bench.profile if record.bench is not None else ""
        feedback = feedback_of(record.verdict, record.timing, record.source, self._rules.backend, profile)
        refined = self._prompts.refined(request.problem, feedback)
        entry = TurnTaken(
            request.rollout_id, group_id, scored.sample, stats, scored.turn_score, refined, now, feedback.category
        )
        if self._rules.mode == "agents":
            entry = self._for_next_role(entry, request, feedback)
        return entry if request.purpose is Purpose.TRAIN else without_tokens(entry, keep_prompt=True)

    def _for_next_role(self, entry: TurnTaken, request: RolloutRequest, feedback: Feedback) -> TurnTaken:
        """What the verifier, or the corrector, is asked after this turn (mode=agents)."""
        if request.role != VERIFIER:
            question = render_verifier(self._rules.prompt_option, request.problem, feedback.kernel)
            has_failed = feedback.category not in ("slow", "fast")
            return msgspec.structs.replace(entry, prompt=question, repair=entry.prompt if has_failed else "")
        judged = self._taken.turns(request.rollout_id)[-1]
        failed = self._taken.failure_of_another(request.rollout_id, request.problem.problem_id)
        first = render_prompt(self._rules.prompt_option, request.problem, self._rules.backend)
        return msgspec.structs.replace(entry, prompt=failed or judged.repair or first, category="")
