"""A finished record becomes a reward, a training sample and the numbers that are watched. Pure.

This is the only place where a reward is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.prompts.roles import predicted, prediction_reward
from kbrl_async.rollouts.rewards.parts import RewardParts, parts_of
from kbrl_async.rollouts.rewards.presets import Preset, plan_reward_of, reward_of
from kbrl_async.rollouts.stats import STEPS, RolloutStats, Step
from kbrl_async.rollouts.turns import TurnScore
from protocols.records import (
    INFRASTRUCTURE_FAULTS,
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Frame,
    Generation,
    RolloutRequest,
    Timing,
    TrainSample,
)

PROMPT_TOO_LONG = "prompt_too_long"
"""Why a rollout is lost whose prompt the policy's context can't hold."""
_FRAMES: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


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


def decode(frames: Sequence[bytes]) -> list[Frame]:
    """The record's frames, one per stage that worked on it."""
    return [_FRAMES.decode(frame) for frame in frames]


def lost_reason(record: Sequence[Frame]) -> str:
    """Why a record has no reward though the broker calls it complete."""
    generation = next((frame for frame in record if isinstance(frame, Generation)), None)
    is_named = generation is not None and generation.message.startswith(f"{PROMPT_TOO_LONG}:")
    return PROMPT_TOO_LONG if is_named else str(Fault.INFRA_ERROR)


def score(record: Sequence[Frame], preset: Preset) -> ScoredTurn | None:
    """The reward of a finished record, or None where infrastructure failed (I4)."""
    parts = parts_of(record)
    if parts is None:
        return None
    by_type = {type(frame): frame for frame in record}
    request, generation = by_type[RolloutRequest], by_type[Generation]
    bench = by_type.get(BenchReport)
    assert isinstance(request, RolloutRequest)
    assert isinstance(generation, Generation)
    timing = bench.timing if isinstance(bench, BenchReport) else None
    reward = reward_of(parts, preset)
    return ScoredTurn(
        sample=_with_classes(_sample(request, generation, reward), generation, parts, preset),
        stats=_stats(request, generation, parts, timing, reward, stage_seconds(record), steps_of(record)),
        fault=parts.fault,
        candidate=generation.candidate,
        timing=timing,
    )


def score_prediction(record: Sequence[Frame], actual: str) -> ScoredTurn | None:
    """The reward of a verifier's turn: how well it foresaw the real verdict of the turn before, `actual`."""
    request = next(frame for frame in record if isinstance(frame, RolloutRequest))
    generation = next((frame for frame in record if isinstance(frame, Generation)), None)
    if generation is None or generation.fault in INFRASTRUCTURE_FAULTS:
        return None
    guess = predicted(generation.text)
    reward = prediction_reward(guess, actual)
    parts = RewardParts(Fault.OK, format=float(bool(guess)))
    stats = _stats(request, generation, parts, None, reward, stage_seconds(record), steps_of(record))
    return ScoredTurn(_sample(request, generation, reward), stats, Fault.OK, None, None)


def _sample(request: RolloutRequest, generation: Generation, reward: float) -> TrainSample:
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


def _with_classes(sample: TrainSample, generation: Generation, parts: RewardParts, preset: Preset) -> TrainSample:
    """The sample with a reward for the tokens around its kernel, where the preset has one."""
    if not preset.plan_weight:
        return sample
    return msgspec.structs.replace(
        sample,
        code_start=generation.code_start,
        code_end=generation.code_end,
        plan_reward=plan_reward_of(parts, preset),
        plan_weight=preset.plan_weight,
    )


def _stats(
    request: RolloutRequest,
    generation: Generation,
    parts: RewardParts,
    timing: Timing | None,
    reward: float,
    seconds: dict[str, float],
    steps: tuple[Step, ...],
) -> RolloutStats:
    return RolloutStats(
        problem_id=request.problem.problem_id,
        level=request.problem.level,
        flagged=bool(request.problem.flags),
        reward=reward,
        format=parts.format > 0,
        compiled=parts.compile > 0,
        correct=parts.correct > 0,
        cheated=parts.fault is Fault.CHEATING,
        fast=timing is not None and timing.is_faster,
        speedup=timing.speedup if timing else None,
        speedup_lo=timing.lo if timing else None,
        speedup_hi=timing.hi if timing else None,
        completion_fraction=float(generation.finish_reason == "stop"),
        turn=request.turn,
        tokens=len(generation.token_ids),
        policy_version=generation.policy_version,
        seconds=seconds,
        funnel=steps,
        rollout_id=request.rollout_id,
        fault=parts.fault.value,
        role=request.role,
    )


def steps_of(record: Sequence[Frame]) -> tuple[Step, ...]:
    """The steps of the funnel that the rollout came to, in order."""
    steps = []
    for frame in record:
        if isinstance(frame, Generation):
            steps.append(Step("format", frame.candidate is not None))
        elif isinstance(frame, BuildReport | BenchReport):
            steps += [Step(stage.name, stage.fault is Fault.OK, stage.seconds) for stage in frame.stages]
    return tuple(step for step in steps if step.name in STEPS)


def stage_seconds(record: Sequence[Frame]) -> dict[str, float]:
    """Seconds of work by stage, and `queue`: what the rollout waited between its stages."""
    names = {Generation: "generate", BuildReport: "compile", BenchReport: "bench"}
    spans = [
        (names[type(frame)], frame.started_at, frame.finished_at)
        for frame in record
        if isinstance(frame, Generation | BuildReport | BenchReport)
    ]
    seconds = {name: max(0.0, end - start) for name, start, end in spans}
    waits = [max(0.0, later[1] - earlier[2]) for earlier, later in itertools.pairwise(spans)]
    return {**seconds, "queue": sum(waits)}
