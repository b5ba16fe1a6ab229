"""What the workbench answers: plain dataclasses, of which the protocol's schemas are made."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProblemLine:
    problem_id: str
    level: int
    name: str
    split: str
    """`train` or `heldout`."""


@dataclass(frozen=True)
class ProblemList:
    problems: list[ProblemLine]
    total: int
    """That fit what was asked, of which `problems` are a part."""


@dataclass(frozen=True)
class ProblemView:
    problem_id: str
    source: str
    """The module to replace: `Model`, `get_inputs()`, `get_init_inputs()`."""
    backend: str
    contract: str
    """What a candidate has to look like."""
    example: str
    """A right candidate for another problem."""


@dataclass(frozen=True)
class Speed:
    """Of a correct kernel over PyTorch; a speedup is claimed only where the whole interval lies above 1."""

    speedup: float
    lo: float
    hi: float
    confidence: float
    proven_faster: bool
    claim: str
    candidate_ms: float
    reference_ms: float
    pairs: int
    hardware: str


@dataclass(frozen=True)
class CandidateReport:
    """What became of one candidate."""

    kernel_id: str
    """By which later calls can name it in place of its source."""
    problem_id: str
    backend: str
    ok: bool
    fault: str
    """`ok`, or how it failed; it is the candidate's fault always."""
    stage: str
    """The last step that it reached: format, static, compile, reference, small_inputs, full_inputs, timing."""
    message: str
    hint: str
    input_sets_passed: int
    input_sets: int
    speed: Speed | None = None


@dataclass(frozen=True)
class ProfileReport:
    report: CandidateReport
    text: str
    """What limits it; empty where it is wrong."""


@dataclass(frozen=True)
class Comparison:
    """Of two candidates for one problem, each timed against PyTorch in this session."""

    first: CandidateReport
    second: CandidateReport
    ratio: float | None = None
    """Time of the first over that of the second; None where one of them is wrong."""
    lo: float | None = None
    hi: float | None = None
    claim: str = ""


@dataclass(frozen=True)
class HistoryEntry:
    kernel_id: str
    problem_id: str
    backend: str
    call: str
    """`verify`, `bench`, `compare` or `profile`."""
    ok: bool
    fault: str
    speedup: float | None
    lo: float | None
    at: float
    """Seconds since 1970."""
    source: str = ""
    """Where it was asked for."""


@dataclass(frozen=True)
class HistoryList:
    entries: list[HistoryEntry] = field(default_factory=list)
    """The newest first."""
    best: HistoryEntry | None = None
    """The right one whose interval begins highest."""
