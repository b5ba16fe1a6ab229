"""One scored turn in columns, as the archive keeps it: what it came to, when, and what was trained on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocols.records import SOLVER, BenchReport, BuildReport, Frame, Generation, Purpose, RolloutRequest

BEFORE, AFTER, EVAL, TRAIN = "before", "after", "eval", "train"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a turn, in epoch seconds: queued ≤ started ≤ finished."""

    stage: str
    queued: float
    started: float
    finished: float
    worker: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One scored turn in columns; the last five are known once it was trained on."""

    task_id: str
    group_id: str
    rollout_id: str
    turn: int = 0
    role: str = SOLVER
    problem_id: str = ""
    level: int = 0
    purpose: str = TRAIN
    """`train`, `before`, `after` (the run's own evaluations) or `eval`."""
    policy_version: int = -1
    """The version that wrote it; −1 where none did."""
    clock: float = 0.0
    """Seconds of the run's own clock at scoring."""
    at: float = 0.0
    """Epoch seconds of scoring."""
    status: str = "ok"
    """`ok`, or why the infrastructure gave up: `worker_lost`, `stale` …"""
    fault: str = ""
    rule: str = ""
    """The tripwire or check that fired."""
    reward: float | None = None
    """The turn's own score; None where infrastructure failed."""
    compiled: bool = False
    correct: bool = False
    speedup: float | None = None
    lo: float | None = None
    hi: float | None = None
    tokens: int = 0
    """Length of the answer."""
    spans: tuple[Span, ...] = ()
    bytes: int = 0
    """Size of its record as stored."""
    batch_id: str = ""
    trained_on: int | None = None
    """The policy version that its batch was trained on; minus `policy_version`: its age."""
    turn_return: float | None = None
    """Discounted return of the turn."""
    advantage: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What a turn became in a batch."""

    task_id: str
    batch_id: str
    trained_on: int
    turn_return: float
    advantage: float


class GroupEnd(msgspec.Struct, frozen=True):
    """The one end of a group."""

    group_id: str
    problem_id: str
    outcome: str
    reason: str = ""
    clock: float = 0.0


class Update(msgspec.Struct, frozen=True):
    """What the learner reported of a batch."""

    batch_id: str
    version: int
    """The version that it made."""
    metrics: dict[str, float]
    started: float = 0.0
    finished: float = 0.0


def make_row(
    task_id: str,
    group_id: str,
    rollout_id: str,
    record: Sequence[Frame],
    *,
    at: float,
    clock: float = 0.0,
    purpose: str = "",
    status: str = "ok",
    fault: str = "",
    reward: float | None = None,
) -> Row:
    """The columns of a record. `purpose`: left out, the request's own."""
    by_type = {type(frame): frame for frame in record}
    request, generation = by_type.get(RolloutRequest), by_type.get(Generation)
    build, bench = by_type.get(BuildReport), by_type.get(BenchReport)
    asked = request if isinstance(request, RolloutRequest) else None
    written = generation if isinstance(generation, Generation) else None
    verdict = bench.verdict if isinstance(bench, BenchReport) else None
    timing = bench.timing if isinstance(bench, BenchReport) else None
    built = build if isinstance(build, BuildReport) else None
    return Row(
        task_id=task_id,
        group_id=group_id,
        rollout_id=rollout_id,
        turn=asked.turn if asked else 0,
        role=asked.role if asked else SOLVER,
        problem_id=asked.problem.problem_id if asked else "",
        level=asked.problem.level if asked else 0,
        purpose=purpose or (EVAL if asked and asked.purpose is Purpose.EVAL else TRAIN),
        policy_version=written.policy_version if written else -1,
        clock=clock,
        at=at,
        status=str(status),
        fault=str(fault),
        rule=(verdict.rule if verdict else "") or (built.rule if built else ""),
        reward=reward,
        compiled=built is not None and built.fault == "ok",
        correct=verdict is not None and verdict.fault == "ok",
        speedup=timing.speedup if timing else None,
        lo=timing.lo if timing else None,
        hi=timing.hi if timing else None,
        tokens=len(written.token_ids) if written else 0,
        spans=spans_of(record, at),
    )


def spans_of(record: Sequence[Frame], scored_at: float) -> tuple[Span, ...]:
    """When each stage got the turn, began and ended; the last is `score`."""
    names = {Generation: "generate", BuildReport: "compile", BenchReport: "bench"}
    ready = next((frame.admitted_at for frame in record if isinstance(frame, RolloutRequest)), 0.0)
    spans = []
    for frame in record:
        if isinstance(frame, Generation | BuildReport | BenchReport):
            queued = min(ready, frame.started_at) if ready else frame.started_at
            spans.append(Span(names[type(frame)], queued, frame.started_at, frame.finished_at, frame.worker_id))
            ready = frame.finished_at
    return (*spans, Span("score", min(ready, scored_at) if ready else scored_at, scored_at, scored_at))
