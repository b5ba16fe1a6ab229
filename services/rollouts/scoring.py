"""A finished record becomes a reward, a training sample and the numbers that are watched. Pure.

This is the only place where a reward is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.prompts.roles import predicted, prediction_reward
from kbrl_async.rollouts.rewards.parts import RewardParts, parts_of
from kbrl_async.rollouts.rewards.presets import Preset, plan_reward_of, reward_of
from kbrl_async.rollouts.turns import TurnOptions, TurnScore
from kbrl_async.runs.archive.funnel import steps_of
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.telemetry.training_metrics import RolloutStats
from protocols.records import Candidate, Fault, Timing, TrainSample
from protocols.rollout import Record, RecordError


class Scored(msgspec.Struct, frozen=True):
    """What the aggregator keeps of one rollout."""

    sample: TrainSample
    stats: RolloutStats
    fault: Fault
    candidate: Candidate | None
    timing: Timing | None

    @property
    def turn_score(self) -> TurnScore:
        return TurnScore(self.sample.reward, self.stats.correct, self.stats.speedup_lo)


def turn_options(config: Config) -> TurnOptions:
    """How many turns a rollout takes, and what they are worth."""
    if config.mode == "single_turn":
        return TurnOptions()
    if config.mode == "agents":  # each role earns its own reward only
        return TurnOptions(config.max_turns, gamma=0.0)
    t = config.turns
    return TurnOptions(config.max_turns, config.gamma, t.returns, t.stop, t.stop_speedup, t.patience)


def received(frames: Sequence[bytes], status: str) -> Record:
    """What came back of a rollout; where its frames are no record a worker failed: its request alone, as lost (I4)."""
    try:
        return Record.decode(frames, status)
    except RecordError:
        return Record.decode(frames[:1], Fault.INFRA_ERROR)


def score(record: Record, preset: Preset) -> Scored | None:
    """The reward of a finished record, or None where infrastructure failed (I4)."""
    parts = parts_of(record)
    if parts is None:
        return None
    sample = _sample(record, reward_of(parts, preset))
    if preset.plan_weight:
        sample = _with_classes(sample, record, parts, preset)
    return Scored(sample, _stats(record, sample, parts), parts.fault, record.candidate, record.timing)


def score_prediction(record: Record, actual: str) -> Scored | None:
    """The reward of a verifier's turn: how well it foresaw the real verdict of the turn before, `actual`."""
    if record.generation is None or not record.is_scorable:
        return None
    guess = predicted(record.generation.text)
    sample = _sample(record, prediction_reward(guess, actual))
    stats = _stats(record, sample, RewardParts(Fault.OK, format=float(bool(guess))))
    return Scored(sample, stats, Fault.OK, None, None)


def _sample(record: Record, reward: float) -> TrainSample:
    request, generation = record.request, record.generation
    assert generation is not None, "what is scored was written"
    return TrainSample(
        request.rollout_id,
        generation.prompt_ids,
        generation.token_ids,
        generation.logprobs,
        0.0,
        reward,
        generation.policy_version,
        request.turn,
        request.role,
    )


def _with_classes(sample: TrainSample, record: Record, parts: RewardParts, preset: Preset) -> TrainSample:
    """The sample with a reward for the tokens around its kernel."""
    generation = record.generation
    assert generation is not None
    return msgspec.structs.replace(
        sample,
        code_start=generation.code_start,
        code_end=generation.code_end,
        plan_reward=plan_reward_of(parts, preset),
        plan_weight=preset.plan_weight,
    )


def _stats(record: Record, sample: TrainSample, parts: RewardParts) -> RolloutStats:
    request, generation, timing = record.request, record.generation, record.timing
    return RolloutStats(
        problem_id=request.problem.problem_id,
        level=request.problem.level,
        flagged=bool(request.problem.flags),
        reward=sample.reward,
        format=parts.format > 0,
        compiled=parts.compile > 0,
        correct=parts.correct > 0,
        cheated=parts.fault is Fault.CHEATING,
        fast=timing is not None and timing.is_faster,
        speedup=timing.speedup if timing else None,
        speedup_lo=timing.lo if timing else None,
        speedup_hi=timing.hi if timing else None,
        completion_fraction=float(generation is not None and generation.finish_reason == "stop"),
        turn=request.turn,
        tokens=len(sample.token_ids),
        policy_version=sample.policy_version,
        seconds=record.seconds,
        funnel=steps_of(record),
        rollout_id=request.rollout_id,
        fault=parts.fault.value,
        role=request.role,
    )
