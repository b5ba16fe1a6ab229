"""One scored turn of a rollout, reduced to what metrics, figures and the curriculum need."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from protocols.records import SOLVER, Fault, says_nothing
from protocols.rollout import STEPS, Record


class StepOutcome(msgspec.Struct, frozen=True, array_like=True):
    """One step that one candidate came to."""

    name: str
    passed: bool
    seconds: float = 0.0


def steps_of(record: Record) -> tuple[StepOutcome, ...]:
    """Those that the rollout's candidate came to, in order."""
    return tuple(StepOutcome(s.name, s.fault is Fault.OK, s.seconds) for s in record.stages if s.name in STEPS)


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """One scored rollout, reduced to what metrics need."""

    problem_id: str
    level: int
    reward: float
    format: bool = False
    """A kernel could be extracted."""
    compiled: bool = False
    correct: bool = False
    cheated: bool = False
    speedup: float | None = None
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    disturbed: bool = False
    """Others had the core most of the time while it was timed."""
    completion_fraction: float = 1.0
    """1 for an answer that ended by itself, 0 for one that was cut at max_tokens."""
    turn: int = 0
    tokens: int = 0
    """Length of the answer."""
    policy_version: int = 0
    """The version that wrote it."""
    staleness: int | None = None
    """Versions between writing it and training on it; None: not trained on."""
    advantage: float | None = None
    seconds: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Time by phase: generate, compile, bench, queue, …"""
    file: str = ""
    """Where the kernel was kept, relative to the run folder."""
    rollout_id: str = ""
    """Turns of one rollout share it."""
    fault: str = ""
    role: str = SOLVER
    """A `verifier` wrote no kernel: its reward says how well it foresaw a verdict."""
    flagged: bool = False
    """An audit holds something against its problem."""
    funnel: tuple[StepOutcome, ...] = ()
    """The steps that it came to."""
    trust: str = ""
    """Of the verdict: `replayed` or `observed`."""
    own_share: float | None = None
    """Of a kernel's device time, that of its own code; None: not known."""
    workload_share: float | None = None
    """Of the workloads of its problem that were looked at, those that it is right on; None: it has but one."""
    built: tuple[str, ...] = ()
    """How its extensions were built: `fast`, or why that was not enough; empty where it has none."""
    ages: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How many versions old it was at the end of each stage."""

    @property
    def is_disturbed(self) -> bool:
        """Its speedup can't be compared with others': it is marked, and not ranked."""
        return self.disturbed or says_nothing(self.speedup_lo, self.speedup_hi)

    @property
    def fast_1(self) -> bool:
        """Correct, and more than once as fast by the point estimate: what KernelBench counts."""
        return self.correct and (self.speedup or 0.0) > 1.0

    @property
    def fast_1_proven(self) -> bool:
        """Correct, and the whole interval of the speedup lies above 1 (I7)."""
        return self.correct and (self.speedup_lo or 0.0) > 1.0
