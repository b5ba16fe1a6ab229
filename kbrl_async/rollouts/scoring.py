"""A finished record becomes a reward, a training sample and the numbers that are watched. Pure.

This is the only place where a reward is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.kernels.backends.inline.ways import ways
from kbrl_async.rollouts.prompts.roles import predicted, prediction_reward
from kbrl_async.rollouts.rewards.parts import earns, has_format, is_built, is_correct
from kbrl_async.rollouts.rewards.presets import Preset, plan_reward_of, plan_spread_of, reward_of, spread_of
from kbrl_async.rollouts.stats import RolloutStats, steps_of
from kbrl_async.rollouts.turns import TurnScore
from protocols.records import DISTURBED, Candidate, Fault, Timing, TrainSample, Verdict
from protocols.rollout import Record, RecordError


class ScoredTurn(msgspec.Struct, frozen=True):
    """What a record of one turn is worth."""

    sample: TrainSample
    stats: RolloutStats
    fault: Fault
    candidate: Candidate | None
    timing: Timing | None

    @property
    def turn_score(self) -> TurnScore:
        return TurnScore(self.sample.reward, self.stats.correct, self.stats.speedup_lo)


def received(frames: Sequence[bytes], status: str) -> Record:
    """What came back of a rollout; where its frames are no record a worker failed: its request alone, as lost (I4)."""
    try:
        return Record.decode(frames, status)
    except RecordError:
        return Record.decode(frames[:1], Fault.INFRA_ERROR)


def score(record: Record, preset: Preset) -> ScoredTurn | None:
    """The reward of a finished record, or None where infrastructure failed (I4)."""
    if not earns(record):
        return None
    sample, fault = _sample(record, reward_of(record, preset), spread_of(record, preset)), record.fault
    if preset.plan_weight:
        sample = _with_classes(sample, record, preset)
    passed = {"format": has_format(record), "compile": is_built(record), "correct": is_correct(record)}
    return ScoredTurn(sample, _stats(record, sample, fault, passed), fault, record.candidate, record.timing)


def score_prediction(record: Record, actual: str) -> ScoredTurn | None:
    """The reward of a verifier's turn: how well it foresaw the real verdict of the turn before, `actual`."""
    if record.generation is None or not record.is_scorable:
        return None
    guess = predicted(record.generation.text)
    sample = _sample(record, prediction_reward(guess, actual))
    stats = _stats(record, sample, Fault.OK, {"format": float(bool(guess))})
    return ScoredTurn(sample, stats, Fault.OK, None, None)


def _sample(record: Record, reward: float, spread: float = 0.0) -> TrainSample:
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
        reward_spread=spread,
        source=hashlib.sha256(record.source.encode()).hexdigest()[:16] if record.source else "",
        truncated=generation.finish_reason == "length",
    )


def _with_classes(sample: TrainSample, record: Record, preset: Preset) -> TrainSample:
    """The sample with a reward for the tokens around its kernel."""
    generation = record.generation
    assert generation is not None
    return msgspec.structs.replace(
        sample,
        code_start=generation.code_start,
        code_end=generation.code_end,
        plan_reward=plan_reward_of(record, preset),
        plan_weight=preset.plan_weight,
        plan_spread=plan_spread_of(record, preset),
    )


def _stats(record: Record, sample: TrainSample, fault: Fault, passed: Mapping[str, float]) -> RolloutStats:
    request, generation, timing = record.request, record.generation, record.timing
    return RolloutStats(
        problem_id=request.problem.problem_id,
        level=request.problem.level,
        flagged=bool(request.problem.flags),
        reward=sample.reward,
        format=bool(passed.get("format")),
        compiled=bool(passed.get("compile")),
        correct=bool(passed.get("correct")),
        cheated=fault is Fault.CHEATING,
        speedup=timing.speedup if timing else None,
        speedup_lo=timing.lo if timing else None,
        speedup_hi=timing.hi if timing else None,
        disturbed=timing is not None and timing.stopped == DISTURBED,
        completion_fraction=float(generation is not None and generation.finish_reason == "stop"),
        turn=request.turn,
        tokens=len(sample.token_ids),
        policy_version=sample.policy_version,
        seconds=record.seconds,
        funnel=steps_of(record),
        rollout_id=request.rollout_id,
        fault=fault.value,
        role=request.role,
        built=ways(record.build.toolchain) if record.build else (),
        trust=record.verdict.trust,
        own_share=record.verdict.own_share,
        workload_share=_workload_share(record.verdict),
    )


def _workload_share(verdict: Verdict) -> float | None:
    right = [one.fault is Fault.OK for one in verdict.workloads]
    return sum(right) / len(right) if right else None
