"""An evaluation as a pure state machine, replayable from its own entries.

::

    problems in order ─▶ begun (its clock runs) ─▶ every sample ended, or lost ─▶ closed
                               └─ deadline ─▶ what is missing has expired ─▶ closed

Invariants
* Every change is an `Entry`; `apply` of the same entries gives the same course (I9).
* Every sample of every problem ends exactly once: judged, lost (our fault) or expired (the policy's).
* No more samples are under way than allowed, whatever their number: memory and queues stay flat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.evaluation.metrics import EAGER, Sample
from kbrl_async.kernels.funnel.result import Result, early
from kbrl_async.kernels.kernelbench.formats import Outcome
from kbrl_async.kernels.problems.finding import number
from kbrl_async.runs.telemetry.training_metrics import RolloutStats
from protocols.records import Fault, Problem
from services.rollouts.trajectories import Trajectories, TurnTaken, best_turn

PREFIX = "eval"


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A problem's samples are asked for."""

    problem_id: str
    at: float


class Tried(msgspec.Struct, frozen=True, tag="tried"):
    """One scored turn with what verifying it gave, and its kernel."""

    rollout_id: str
    stats: RolloutStats
    result: Result
    source: str
    at: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A sample takes no further turn. `reason`: why the last one has no verdict (I4)."""

    rollout_id: str
    at: float
    reason: str = ""


class Expired(msgspec.Struct, frozen=True, tag="expired"):
    """A problem's time is up."""

    problem_id: str
    at: float


Entry = Begun | Tried | TurnTaken | Ended | Expired


class Kept(msgspec.Struct, frozen=True):
    """A sample that has ended: its figures, and the best turn's outcome and kernel where there is one."""

    sample: Sample
    outcome: Outcome
    source: str = ""


class Course:
    """See the module's docstring."""

    def __init__(self, problems: Sequence[Problem], samples: int, in_flight: int, deadline_s: float) -> None:
        self.problems: dict[str, Problem] = {problem.problem_id: problem for problem in problems}
        self.samples, self.in_flight, self.deadline_s = samples, max(in_flight, samples), deadline_s
        self.dialogues = Trajectories()
        self.kept: dict[str, Kept] = {}
        self.lost: dict[str, str] = {}
        self.clock = 0.0
        self._begun: dict[str, float] = {}
        self._open: dict[str, str] = {}
        """Rollout → problem, of what is under way."""
        self._tried: dict[str, list[Tried]] = {}

    # ── questions ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def total(self) -> int:
        return len(self.problems) * self.samples

    @property
    def done(self) -> int:
        return len(self.kept) + len(self.lost)

    @property
    def has_ended(self) -> bool:
        return self.done == self.total

    def rollouts(self, problem_id: str) -> list[str]:
        return [f"{PREFIX}.{problem_id}.{sample}" for sample in range(self.samples)]

    def open_rollouts(self) -> Mapping[str, str]:
        """Rollout → problem id, of what is under way."""
        return self._open

    def next_problem(self) -> Problem | None:
        """The one to begin now; None where all have begun, or enough is under way."""
        if len(self._open) + self.samples > self.in_flight:
            return None
        return next((p for key, p in self.problems.items() if key not in self._begun), None)

    def overdue(self, now: float) -> list[str]:
        """Problems whose time is up and that have samples under way."""
        late = {p for p in self._open.values() if now - self._begun[p] >= self.deadline_s}
        return sorted(late)

    def next_deadline(self) -> float | None:
        return min((self._begun[p] + self.deadline_s for p in self._open.values()), default=None)

    def turns(self, rollout_id: str) -> int:
        return len(self.dialogues.turns(rollout_id))

    # ── the only place where state changes ────────────────────────────────────────────────────────────────────

    def apply(self, entry: Entry) -> None:
        """Applies one entry; a late copy of an end changes nothing."""
        self.clock = max(self.clock, entry.at)
        match entry:
            case Begun():
                self._begun[entry.problem_id] = entry.at
                self._open |= dict.fromkeys(self.rollouts(entry.problem_id), entry.problem_id)
            case Tried() if entry.rollout_id in self._open:
                self._tried.setdefault(entry.rollout_id, []).append(entry)
            case TurnTaken() if entry.rollout_id in self._open:
                self.dialogues.apply(entry)
            case Ended() if entry.rollout_id in self._open:
                self._end(entry.rollout_id, entry.reason)
            case Expired():
                for rollout_id in [key for key, problem in self._open.items() if problem == entry.problem_id]:
                    self._end(rollout_id, "", expired=True)
            case _:
                pass

    def _end(self, rollout_id: str, reason: str, *, expired: bool = False) -> None:
        problem = self.problems[self._open.pop(rollout_id)]
        tried = self._tried.pop(rollout_id, [])
        self.dialogues.forget(rollout_id)
        if tried:
            self.kept[rollout_id] = keep(problem, rollout_id, tried)
        elif expired:
            self.kept[rollout_id] = expired_sample(problem, rollout_id)
        else:
            self.lost[rollout_id] = reason or "infra_error"


def keep(problem: Problem, rollout_id: str, tried: Sequence[Tried]) -> Kept:
    """The sample that a rollout's turns come to: its best turn."""
    best = best_turn([turn.stats for turn in tried])
    chosen = next(turn for turn in tried if turn.stats is best)
    result, sample = chosen.result, _sample_number(rollout_id)
    timing = result.timing
    eager = {} if timing is None else {EAGER: (timing.speedup, timing.lo, timing.hi)}
    figures = Sample(
        problem_id=problem.problem_id,
        level=problem.level,
        sample=sample,
        compiled=result.compiled,
        correct=result.ok,
        cheated=best.cheated,
        fault=result.fault.value,
        speedups={**eager, **(timing.baselines if timing else {})},
        candidate_ms=timing.candidate_ms if timing else None,
        reference_ms=timing.reference_ms if timing else None,
        flags=problem.flags,
        turns=len(tried),
        tokens=sum(turn.stats.tokens for turn in tried),
        reward=best.reward,
        policy_version=best.policy_version,
    )
    outcome = Outcome(problem.level, number(problem) or 0, sample, "", result)
    return Kept(figures, outcome, chosen.source)


def expired_sample(problem: Problem, rollout_id: str) -> Kept:
    """Not answered in time: wrong, as KernelBench counts a timeout."""
    sample = _sample_number(rollout_id)
    figures = Sample(
        problem_id=problem.problem_id,
        level=problem.level,
        sample=sample,
        fault="expired",
        flags=problem.flags,
        expired=True,
    )
    verdict = early(Fault.TIMEOUT, "no answer with a verdict before the problem's deadline")
    result = Result(problem.problem_id, "", "", verdict, (), origin="response")
    return Kept(figures, Outcome(problem.level, number(problem) or 0, sample, "", result))


def _sample_number(rollout_id: str) -> int:
    return int(rollout_id.rpartition(".")[2])
