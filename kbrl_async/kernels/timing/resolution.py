"""The bench against itself: what it can't tell apart on this host, by kernel length; kept in a file, used by rewards.

::

    A/A and A/B runs (Trial) ─▶ summarise ─▶ Row per case ─▶ Report ─▶ file ─▶ points() ─▶ Recipe.resolved

Invariants
* A share covers what no sampling removes (two processes of one code differ by where their memory lies), so it is
  estimated from whole measurements of fresh processes, never from the pairs of one.
* A report is only used on the hardware that it was made on.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.kernels.timing.recipe import PLACEMENT, Point

RUN_FILE = "bench-resolution.json"
"""The copy in a run's folder: what its rewards were widened by."""
MIN_RUNS = 10
"""Of one case, to trust its share."""
MAX_LOAD = 0.2
_Z99 = 2.576
_FLOOR = 0.001


class Trial(msgspec.Struct, frozen=True):
    """One whole measurement of a candidate whose true speedup is known: 1 for A/A. The interval is not yet widened."""

    speedup: float
    lo: float
    hi: float
    ms: float
    n: int
    seconds: float
    stopped: str = ""
    truth: float = 1.0
    load: float = 0.0
    mhz: float | None = None
    throttle: list[str] = msgspec.field(default_factory=list)


class CaseRow(msgspec.Struct, frozen=True):
    """All trials of one case. Rates are of the intervals as a reward sees them, widened by `share`."""

    case: str
    ms: float
    runs: int
    share: float
    false_faster: float
    false_slower: float
    worst_error: float
    """Largest |speedup / truth − 1|."""
    covered: float
    """Share of the runs whose interval holds the truth."""
    median_n: float
    seconds: float
    """Of exclusive bench time per decision, median."""
    truth: float = 1.0
    methods: dict[str, float] = msgspec.field(default_factory=dict)
    """Worst error of other ways to time the same, by name."""


class ResolutionReport(msgspec.Struct, frozen=True):
    hardware: str
    rows: list[CaseRow]
    truths: list[CaseRow] = msgspec.field(default_factory=list)
    """The A/B table, where one was asked for."""
    load: float = 0.0
    clocks: dict[str, float] = msgspec.field(default_factory=dict)
    """MHz while the bench worked: `min`, `median`, `max`."""
    throttle: list[str] = msgspec.field(default_factory=list)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    made_at: float = 0.0

    @property
    def false_faster(self) -> float:
        """Over all A/A runs."""
        runs = sum(row.runs for row in self.rows)
        return sum(row.false_faster * row.runs for row in self.rows) / runs if runs else 0.0

    @property
    def is_quiet(self) -> bool:
        """Under load the noise hides what it should find: such a report must not be used for rewards."""
        return self.load <= MAX_LOAD

    def points(self) -> tuple[Point, ...]:
        """For `Recipe.resolved`. Few runs can widen what is assumed without any, but not narrow it."""
        return tuple(
            Point(row.ms, row.share if row.runs >= MIN_RUNS else max(row.share, PLACEMENT))
            for row in sorted(self.rows, key=lambda row: row.ms)
        )


def unresolved(trials: Sequence[Trial], z: float = 2.33) -> float:
    """The relative share to add so that the truth stays inside: spread of whole measurements beyond what their own
    intervals explain, at 99 % and with the uncertainty of so few runs, plus the bias that they have in common.
    """
    errors = [math.log(trial.speedup / trial.truth) for trial in trials]
    if len(errors) < 3:
        return max((abs(error) for error in errors), default=0.0) + _FLOOR
    # One half width is z standard errors of one measurement, looks included: so this errs to the wide side.
    explained = statistics.median(_spread(trial) / z for trial in trials) ** 2
    beyond = math.sqrt(max(0.0, statistics.variance(errors) - explained))
    few = math.sqrt((len(errors) - 1) / _chi_square(0.1, len(errors) - 1))
    bias = max(0.0, abs(statistics.fmean(errors)) - statistics.stdev(errors) / math.sqrt(len(errors)))
    return max(_FLOOR, math.expm1(_Z99 * beyond * few + bias))


def _spread(trial: Trial) -> float:
    return math.log(trial.hi / trial.lo) / 2 if trial.lo > 0 and trial.hi < math.inf else 0.0


def _chi_square(share: float, freedom: int) -> float:
    from scipy.special import chdtri

    return float(chdtri(freedom, 1 - share))


def summarise(case: str, trials: Sequence[Trial], share: float | None = None, **methods: float) -> CaseRow:
    """`share`: None to estimate it from these trials, which then are A/A; else the one that was in use."""
    if not trials:
        raise ValueError(f"{case} has no trials")
    width = unresolved(trials) if share is None else share
    lows = [trial.lo / (1 + width) for trial in trials]
    highs = [trial.hi * (1 + width) for trial in trials]
    both = list(zip(lows, highs, (trial.truth for trial in trials), strict=True))
    return CaseRow(
        case,
        statistics.median(trial.ms for trial in trials),
        len(trials),
        width,
        statistics.fmean(low > max(1.0, truth) for low, _, truth in both),
        statistics.fmean(high < min(1.0, truth) for _, high, truth in both),
        max(abs(trial.speedup / trial.truth - 1) for trial in trials),
        statistics.fmean(low <= truth <= high for low, high, truth in both),
        statistics.median(trial.n for trial in trials),
        statistics.median(trial.seconds for trial in trials),
        statistics.median(trial.truth for trial in trials),
        methods,
    )


def clock_range(trials: Sequence[Trial]) -> dict[str, float]:
    clocks = [trial.mhz for trial in trials if trial.mhz is not None]
    if not clocks:
        return {}
    return {"min": min(clocks), "median": statistics.median(clocks), "max": max(clocks)}


def cache_folder(configured: str | None = None) -> Path:
    """Where what several runs share lies: as configured, else our folder in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(configured).expanduser() if configured else users / "kbrl-async"


def file_name(hardware: str) -> str:
    """In the cache, one for each kind of hardware."""
    return f"bench-resolution-{re.sub(r'[^A-Za-z0-9]+', '-', hardware).strip('-').lower()}.json"


def for_run(cache: Path, run_dir: Path, hardware: str) -> tuple[Point, ...]:
    """The points for a run's recipe: from its own copy (a run goes on as it began), else from the cache's.

    Empty where this host's bench was never tested against itself.
    """
    own = run_dir / RUN_FILE
    report = load(own, hardware)
    if report is None and (report := load(cache / file_name(hardware), hardware)) is not None:
        save(report, own)
    return () if report is None else report.points()


def save(report: ResolutionReport, path: Path) -> None:
    """Atomic: a reader sees the old report or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    part.replace(path)


def load(path: Path, hardware: str) -> ResolutionReport | None:
    """The report kept there; None where there is none, it does not parse, or it is of other hardware."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=ResolutionReport)
    except (OSError, msgspec.MsgspecError):
        return None
    return report if report.hardware == hardware else None
