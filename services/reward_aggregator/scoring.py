"""A finished record becomes a reward, a training sample and the numbers that are watched. Pure.

This is the only place where a reward is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from kbrl_async.rewards.parts import RewardParts, parts_of
from kbrl_async.rewards.presets import Preset, reward_of
from kbrl_async.telemetry.training_metrics import RolloutStats
from protocols.records import (
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

_FRAMES: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Scored(msgspec.Struct, frozen=True):
    """What the aggregator keeps of one rollout."""

    sample: TrainSample
    stats: RolloutStats
    fault: Fault
    candidate: Candidate | None
    timing: Timing | None


def decode(frames: Sequence[bytes]) -> list[Frame]:
    """The record's frames, one per stage that worked on it."""
    return [_FRAMES.decode(frame) for frame in frames]


def score(record: Sequence[Frame], preset: Preset) -> Scored | None:
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
    return Scored(
        sample=TrainSample(
            request.rollout_id,
            generation.prompt_ids,
            generation.token_ids,
            generation.logprobs,
            0.0,
            reward,
            generation.policy_version,
            request.turn,
        ),
        stats=_stats(request, generation, parts, timing, reward, stage_seconds(record)),
        fault=parts.fault,
        candidate=generation.candidate,
        timing=timing,
    )


def _stats(
    request: RolloutRequest,
    generation: Generation,
    parts: RewardParts,
    timing: Timing | None,
    reward: float,
    seconds: dict[str, float],
) -> RolloutStats:
    return RolloutStats(
        problem_id=request.problem.problem_id,
        level=request.problem.level,
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
    )


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
