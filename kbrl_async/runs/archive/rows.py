"""One scored turn in columns, as the archive keeps it: what it came to, when, and what was trained on it. Pure."""

from __future__ import annotations

import msgspec

from kbrl_async.rollouts.stats import steps_of
from kbrl_async.runs.archive.funnel import way
from protocols.messages import Stage, Status
from protocols.records import SOLVER, VERIFIER, Fault, Purpose
from protocols.rollout import Record, StageSpan

BEFORE, AFTER, EVAL, TRAIN = "before", "after", "eval", "train"


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
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
    """The static check, or the check against cheating, that fired."""
    reward: float | None = None
    """The turn's own score; None where infrastructure failed."""
    compiled: bool = False
    correct: bool = False
    speedup: float | None = None
    lo: float | None = None
    hi: float | None = None
    disturbed: bool = False
    """Its speedup can't be compared with others'; see `Timing.is_disturbed`."""
    step: str = ""
    """The last step of the funnel that it came to: it passed it if it is correct, else it left there."""
    tokens: int = 0
    """Length of the answer."""
    spans: tuple[StageSpan, ...] = ()
    """The last is `score`."""
    bytes: int = 0
    """Size of its record as stored."""
    batch_id: str = ""
    trained_on: int | None = None
    """The policy version that its batch was trained on; minus `policy_version`: its age."""
    turn_return: float | None = None
    """Discounted return of the turn."""
    advantage: float | None = None


class TurnOutcome(msgspec.Struct, frozen=True):
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


class UpdateRow(msgspec.Struct, frozen=True):
    """What the learner reported of a batch."""

    batch_id: str
    version: int
    """The version that it made."""
    metrics: dict[str, float]
    started: float = 0.0
    finished: float = 0.0


def make_row(
    task_id: str, record: Record, *, at: float, clock: float = 0.0, purpose: str = "", reward: float | None = None
) -> TurnRow:
    """The columns of a record. `purpose`: left out, the request's own. `reward`: None where infrastructure failed."""
    request, generation, timing = record.request, record.generation, record.timing
    is_lost = record.status == Status.OK and not record.is_scorable
    return TurnRow(
        task_id=task_id,
        group_id=request.group_id,
        rollout_id=request.rollout_id,
        turn=request.turn,
        role=request.role,
        problem_id=request.problem.problem_id,
        level=request.problem.level,
        purpose=purpose or (EVAL if request.purpose is Purpose.EVAL else TRAIN),
        policy_version=generation.policy_version if generation is not None else -1,
        clock=clock,
        at=at,
        status=Fault.INFRA_ERROR.value if is_lost else record.status,
        fault=record.fault.value if record.is_scorable else "",
        rule=record.verdict.rule,
        reward=reward,
        compiled=record.build is not None and record.build.fault is Fault.OK,
        correct=record.bench is not None and record.bench.verdict.fault is Fault.OK,
        speedup=timing.speedup if timing else None,
        lo=timing.lo if timing else None,
        hi=timing.hi if timing else None,
        disturbed=timing is not None and timing.is_disturbed,
        step=way(steps_of(record), record.fault)[-1].name if record.is_scorable and request.role != VERIFIER else "",
        tokens=len(generation.token_ids) if generation is not None else 0,
        spans=(*record.spans, _scoring(record, at)),
    )


def _scoring(record: Record, at: float) -> StageSpan:
    """It waits for its score since its last stage."""
    ready = record.work[-1].finished_at if record.work else record.request.admitted_at
    return StageSpan(Stage.SCORE, min(ready, at) if ready else at, at, at)
