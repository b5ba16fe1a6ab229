"""What a report is made of: one run as plain data, whatever files it was read from.

::

    RUN/  ─ read_run ─▶  RunData  ─ sections ─▶  HTML

Invariants
* Times (`at`, spans) are seconds since the run's first sign of life.
* What a run folder lacks is an empty field and a line in `missing`, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kbrl_async.evaluation.document import Document
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry.by_version import Answers
from kbrl_async.runs.telemetry.system_metrics import SystemSample
from protocols.messages import Stage
from protocols.rollout import STAGES as ROLLOUT_STAGES
from protocols.rollout import StageSpan

TRAIN, BEFORE, AFTER = "train", "eval-before", "eval-after"
ROUND = "eval-v"
"""Begins the phase of an evaluation during training; the policy version follows."""
STAGES: tuple[str, ...] = (*ROLLOUT_STAGES, Stage.SCORE, Stage.TRAIN)


class ReportedTurn(msgspec.Struct, frozen=True):
    """One scored turn of a rollout, in the order of scoring. No figure may go by that: failures are scored first."""

    stats: RolloutStats
    phase: str = TRAIN
    """`train`, `eval-before`, `eval-after`, or `eval-v5` for a round during training."""
    group_id: str = ""
    at: float | None = None
    """When it was scored."""
    asked: float | None = None
    """When it was asked for."""
    spans: tuple[StageSpan, ...] = ()
    task_id: str = ""
    """Its key in the archive."""


class PolicyUpdate(msgspec.Struct, frozen=True):
    """One update of the policy."""

    version: int
    """That it made."""
    at: float
    start: float | None = None
    """When the learner took the batch up."""
    made: float | None = None
    """When the batch was put together."""
    group_ids: tuple[str, ...] = ()

    @property
    def spans(self) -> tuple[StageSpan, ...]:
        """The learner's work on it, where that is known."""
        return () if self.start is None else (StageSpan(Stage.TRAIN, self.start, self.start, self.at, "learner"),)


class BestKernel(msgspec.Struct, frozen=True):
    """The fastest verified kernel of a problem, beside what it replaces."""

    problem_id: str
    speedup: float
    lo: float
    hi: float
    source: str = ""
    reference: str = ""
    file: str = ""
    policy_version: int | None = None
    rollout_id: str = ""
    turn: int = 0
    at: float | None = None
    candidate_ms: float | None = None
    reference_ms: float | None = None
    baselines: Mapping[str, tuple[float, float, float]] = msgspec.field(default_factory=dict)
    task_id: str = ""
    pairs: int | None = None
    profile: str = ""
    """What limits it, where the run asked (turns.profile)."""
    workloads: tuple[str, ...] = ()
    """How each ended, of a problem with several."""


class SampledTurn(msgspec.Struct, frozen=True):
    """One turn with all that was said and found: what the policy read, what it wrote, and what became of that."""

    turn: ReportedTurn
    prompt: str
    answer: str
    message: str = ""
    """Of the verdict, as the next turn of the rollout would read it."""
    hint: str = ""
    checks: tuple[tuple[str, str, float, str], ...] = ()
    """(step, fault, seconds, detail) in the order of the funnel."""


class Mistake(msgspec.Struct, frozen=True):
    """A kind of failure: messages that are alike but for their numbers, names and places."""

    fault: str
    kind: str
    count: int
    """Among the failures that were read."""
    problems: int
    example: str
    """The whole message of one of them."""
    hint: str
    task_id: str
    """Whose example it is."""


class Examples(msgspec.Struct, frozen=True):
    """What is shown of single turns; see `examples`."""

    mistakes: Mapping[str, Sequence[Mistake]] = {}
    """By fault, the commonest first."""
    read: Mapping[str, tuple[int, int]] = {}
    """By fault: training turns whose message was read, and all that failed so."""
    sample: Sequence[SampledTurn] = ()
    kept: int = 0
    """Turns whose text the archive still has."""

    def place(self, task_id: str) -> int | None:
        """Where a turn stands in the sample."""
        return next((i for i, one in enumerate(self.sample) if one.turn.task_id == task_id), None)


class LogLine(msgspec.Struct, frozen=True):
    """A warning or an error of a process."""

    at: float
    process: str
    level: str
    event: str
    detail: str = ""


class RunData(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring."""

    name: str
    summary: Mapping[str, Any] = msgspec.field(default_factory=dict)
    evaluation: Document | None = None
    """Of a run that was an evaluation."""
    config: str = ""
    """The resolved configuration as YAML."""
    turns: Sequence[ReportedTurn] = ()
    answers: Answers = Answers()
    """Those of training, for all that is shown by policy version."""
    updates: Sequence[PolicyUpdate] = ()
    system: Sequence[SystemSample] = ()
    """`t` is seconds since the start here."""
    curves: Mapping[str, Sequence[tuple[float, float]]] = msgspec.field(default_factory=dict)
    """(update, value) of the learner's metrics."""
    kernels: Sequence[BestKernel] = ()
    examples: Examples = Examples()
    rules: Mapping[str, int] = msgspec.field(default_factory=dict)
    """How often each static check or check against cheating fired."""
    log: Sequence[LogLine] = ()
    log_count: int = 0
    facts: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Hardware, toolchains, isolation and versions, as the run saw them."""
    started_at: float = 0.0
    """Epoch seconds of time 0."""
    duration: float = 0.0
    missing: Sequence[str] = ()

    @property
    def training(self) -> list[ReportedTurn]:
        return [turn for turn in self.turns if turn.phase == TRAIN]

    def phase(self, name: str) -> list[RolloutStats]:
        return [turn.stats for turn in self.turns if turn.phase == name]
