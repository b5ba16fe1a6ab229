"""What `kbrl eval` asks of a policy, as a pure state machine: problems with deadlines, and what became of each answer.

::

    problems in order ─▶ begun (its clock runs) ─▶ every sample ended, or lost ─▶ closed
                               └─ deadline ─▶ what is missing has expired ─▶ closed

Invariants
* Every change is a `Command` given to `do`; the same commands give the same course (I9).
* Every sample of every problem ends exactly once: judged, lost (our fault) or expired (the policy's).
* No more samples are under way than allowed, whatever their number: memory and queues stay flat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kbrl_async.evaluation.metrics import EAGER, OnWorkload, Sample, sample_of
from kbrl_async.evaluation.progress import EvaluationProgress
from kbrl_async.kernels.funnel.result import Result, early
from kbrl_async.kernels.kernelbench.formats import SampleOutcome
from kbrl_async.kernels.problems.finding import number
from kbrl_async.kernels.problems.workloads import is_tail
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import Trajectories, TurnTaken, best_turn
from protocols.records import Fault, Problem

NAME = "eval"


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The evaluation begins. Older journals say it of every problem again, which changes nothing."""

    problem_id: str
    """The first problem's."""
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


Command = Begun | Tried | TurnTaken | Ended | Expired


class AskAnswer(NamedTuple):
    """To be done: the next turn of this rollout is asked for."""

    rollout_id: str
    problem: Problem

    @property
    def group_id(self) -> str:
        return group_of(self.problem.problem_id)


class RetireProblem(NamedTuple):
    """To be done: the broker forgets this group's tasks."""

    group_id: str


Effect = AskAnswer | RetireProblem


class KeptSample(msgspec.Struct, frozen=True):
    """A sample that has ended: its figures, and the best turn's outcome and kernel where there is one."""

    sample: Sample
    outcome: SampleOutcome
    source: str = ""


def group_of(problem_id: str) -> str:
    return f"{NAME}.{problem_id}"


class Course:
    """See the module's docstring. `samples`, `in_flight` and `deadline_s` are the settings of these names."""

    def __init__(self, problems: Sequence[Problem], samples: int, in_flight: int, deadline_s: float) -> None:
        self.problems = {problem.problem_id: problem for problem in problems}
        self.deadline_s = deadline_s
        self.clock = 0.0
        self._progress: EvaluationProgress[KeptSample | str] = EvaluationProgress(
            NAME, problems, samples, in_flight, whole_problems=True
        )
        self._trajectories = Trajectories()
        self._tried: dict[str, list[Tried]] = {}
        self._has_begun = False

    # ── questions ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def total(self) -> int:
        return self._progress.total

    @property
    def done(self) -> int:
        return len(self._progress.ended)

    @property
    def has_ended(self) -> bool:
        return self._progress.has_ended

    @property
    def kept(self) -> dict[str, KeptSample]:
        """The samples that have figures, by rollout."""
        return {key: end for key, end in self._progress.ended.items() if isinstance(end, KeptSample)}

    @property
    def lost(self) -> dict[str, str]:
        """Why the others have none, by rollout."""
        return {key: end for key, end in self._progress.ended.items() if isinstance(end, str)}

    @property
    def open(self) -> Mapping[str, Problem]:
        """Rollouts that are under way, and their problems."""
        return self._progress.open

    def open_work(self) -> list[Effect]:
        """All that is under way: what a restart asks for again."""
        return [AskAnswer(rollout_id, problem) for rollout_id, problem in self.open.items()]

    def awaits(self, rollout_id: str, turn: int) -> bool:
        """Whether this is the turn that the rollout is at."""
        return rollout_id in self.open and turn == len(self.turns(rollout_id))

    def turns(self, rollout_id: str) -> Sequence[TurnTaken]:
        return self._trajectories.turns(rollout_id)

    def strictness_of(self, group_id: str) -> None:
        """Evaluations check everything."""

    def failure_of_another(self, rollout_id: str, problem_id: str) -> str:
        return self._trajectories.failure_of_another(rollout_id, problem_id)

    def due(self, now: float) -> Command | None:
        """What time has brought about."""
        if not self._has_begun and self.problems:
            return Begun(next(iter(self.problems)), now)
        return next((Expired(late, now) for late in self._progress.overdue(now, self.deadline_s)), None)

    # ── the only place where state changes ────────────────────────────────────────────────────────────────────

    def do(self, command: Command) -> list[Effect]:
        """Applies a command and says what is to be done; a late copy of an end changes nothing."""
        self.clock = max(self.clock, command.at)
        match command:
            case Begun():
                self._has_begun = True
            case Tried() if command.rollout_id in self.open:
                self._tried.setdefault(command.rollout_id, []).append(command)
                return []
            case TurnTaken() if command.rollout_id in self.open:
                self._trajectories.apply(command)
                return [AskAnswer(command.rollout_id, self.open[command.rollout_id])]
            case Ended() if command.rollout_id in self.open:
                self._end(command.rollout_id, command.reason)
            case Expired():
                for rollout_id in [key for key, p in self.open.items() if p.problem_id == command.problem_id]:
                    self._end(rollout_id, "", expired=True)
                return [RetireProblem(group_of(command.problem_id)), *self._begin(command.at)]
            case _:
                return []
        return self._begin(command.at)

    def _begin(self, at: float) -> list[Effect]:
        return [AskAnswer(rollout_id, problem) for rollout_id, problem in self._progress.begin(at).items()]

    def _end(self, rollout_id: str, reason: str, *, expired: bool = False) -> None:
        problem, tried = self.open[rollout_id], self._tried.pop(rollout_id, [])
        self._trajectories.forget(rollout_id)
        if tried:
            self._progress.end(rollout_id, keep(problem, rollout_id, tried))
        elif expired:
            self._progress.end(rollout_id, expired_sample(problem, rollout_id))
        else:
            self._progress.end(rollout_id, reason or "infra_error")


def keep(problem: Problem, rollout_id: str, tried: Sequence[Tried]) -> KeptSample:
    """The sample that a rollout's turns come to: its best turn."""
    best = best_turn([turn.stats for turn in tried])
    chosen = next(turn for turn in tried if turn.stats is best)
    result, sample = chosen.result, _sample_number(rollout_id)
    timing = result.timing
    eager = {} if timing is None else {EAGER: (timing.speedup, timing.lo, timing.hi)}
    figures = msgspec.structs.replace(
        sample_of(best, sample),
        problem_id=problem.problem_id,
        level=problem.level,
        compiled=result.compiled,
        correct=result.ok,
        fault=result.fault.value,
        speedups={**eager, **(timing.baselines if timing else {})},
        candidate_ms=timing.candidate_ms if timing else None,
        reference_ms=timing.reference_ms if timing else None,
        flags=problem.flags,
        workloads=_by_workload(result),
        turns=len(tried),
        tokens=sum(turn.stats.tokens for turn in tried),
    )
    return KeptSample(figures, SampleOutcome(problem.level, number(problem) or 0, sample, "", result), chosen.source)


TAILS = "secret shapes"


def _by_workload(result: Result) -> dict[str, OnWorkload]:
    """Those that the problem names; secret ones, which differ from answer to answer, as one."""
    timed = {} if result.timing is None else {one.name: one.speedup for one in result.timing.workloads}
    found: dict[str, OnWorkload] = {}
    for one in result.verdict.workloads:
        name = TAILS if is_tail(one.name) else one.name
        before = found.get(name, OnWorkload(True))
        found[name] = OnWorkload(before.correct and one.fault is Fault.OK, timed.get(one.name))
    return found


def expired_sample(problem: Problem, rollout_id: str) -> KeptSample:
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
    return KeptSample(figures, SampleOutcome(problem.level, number(problem) or 0, sample, "", result))


def _sample_number(rollout_id: str) -> int:
    return int(rollout_id.rpartition(".")[2])
