"""Records as a run makes them: what a test does not name is as plain as it can be."""

from __future__ import annotations

from typing import Any

import msgspec

from kbrl_async.rollouts.stats import RolloutStats
from protocols.records import (
    SOLVER,
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    Purpose,
    RolloutRequest,
    SamplingParams,
    Timing,
    TrainSample,
    Verdict,
)
from protocols.rollout import Record, Work

RELU = Problem("L1/07_relu", 1, "relu", "class Model: …")
RIGHT = BenchReport(Verdict(Fault.OK, 4, 4), Timing(9, 1.5, 1.4, 1.6, 2.0, 3.0), "bench.1", 103.5, 104.0)


def turn(*work: Work, role: str = SOLVER, status: str = "ok") -> Record:
    """A record of which only what the stages found counts."""
    return Record.of(RolloutRequest("r", "g", RELU, "", "c", SamplingParams(64), role=role), *work, status=status)


def record(
    rollout_id: str = "g000001.r0",
    text: str = "answer",
    *,
    source: str = "src",
    problem: Problem = RELU,
    prompt: str = "prompt",
    purpose: Purpose = Purpose.TRAIN,
    finish: str = "stop",
    bench: BenchReport = RIGHT,
) -> Record:
    """A rollout that came to its end: asked for at 100, written by 102, built by 103, judged by 104."""
    request = RolloutRequest(
        rollout_id, rollout_id.partition(".")[0], problem, prompt, "c", SamplingParams(64), purpose, admitted_at=100.0
    )
    written = Generation(
        3, [1, 2], [5, 6, 7], [-0.5, -0.25, -1.0], text, finish, Candidate(source, "c"), worker_id="sampler.1",
        started_at=101.0, finished_at=102.0,
    )  # fmt: skip
    built = BuildReport(Fault.OK, worker_id="farm.1", started_at=102.5, finished_at=103.0)
    return Record.of(request, written, built, bench)


def timing(speedup: float, half: float = 0.1, **more: Any) -> Timing:
    """`half`: of its interval."""
    plain = Timing(9, speedup, speedup - half, speedup + half, candidate_ms=1.0, reference_ms=speedup)
    return msgspec.structs.replace(plain, **more)


def sample(rollout_id: str = "r", reward: float = 0.0, version: int = 0, turn: int = 0) -> TrainSample:
    """One short turn, whose advantage nobody has computed yet."""
    return TrainSample(rollout_id, [1], [2, 3], [-0.1, -0.2], 0.0, reward, version, turn)


def stats(reward: float = 0.0, problem_id: str = "L1/a", **more: Any) -> RolloutStats:
    return RolloutStats(problem_id=problem_id, level=1, reward=reward, **more)
