"""What a run came to, in one sentence: does the policy learn, what does the run wait for, how do answers fail. Pure.

::

    learns: held-out correct 9 → 22 % (+13 points, +4 … +22) · the bench is what it waits for · most failures: …

Invariants
* Each part is computed from data that the page shows below, and says of which; a part without data is left out.
* "Learns" and "gets worse" are said only where the 95 % interval of the difference leaves 0 out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.evaluation.document import Document
from kbrl_async.evaluation.metrics import EAGER, Figure
from kbrl_async.lab.report import differences, numbers
from kbrl_async.lab.report.differences import Delta
from kbrl_async.lab.report.model import AFTER, BEFORE, RunData
from kbrl_async.lab.report.waiting import waits
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry.by_version import ends, settled
from protocols.messages import Stage
from protocols.records import Fault

STAGE_NAMES = {
    Stage.GENERATE: "sampler", Stage.COMPILE: "compile farm", Stage.BENCH: "bench", Stage.TRAIN: "learner",
}  # fmt: skip
FAULT_NAMES = {
    Fault.FORMAT_ERROR: "no code", Fault.STATIC_VIOLATION: "static checks", Fault.COMPILE_ERROR: "compile errors",
    Fault.RUNTIME_ERROR: "runtime errors", Fault.TIMEOUT: "timeouts", Fault.OUT_OF_MEMORY: "out of memory",
    Fault.ILLEGAL_ACCESS: "illegal memory access", Fault.INCORRECT: "wrong results", Fault.CHEATING: "cheating",
    Fault.UNPROVEN: "unproven work",
}  # fmt: skip
MOST_FAULTS = 2
NO_CHANGE = "no change that can be told from chance"


class RateChange(msgspec.Struct, frozen=True):
    """One rate at two times."""

    what: str
    before: float
    after: float
    difference: Delta | None

    @property
    def label(self) -> str:
        """`learns`, `gets worse`, or that nothing can be told."""
        if self.difference is None or not self.difference.is_told:
            return NO_CHANGE
        return "learns" if self.difference.value > 0 else "gets worse"

    @property
    def in_figures(self) -> str:
        words = f"{self.what} {numbers.percent(self.before)} → {numbers.percent(self.after)}"
        return f"{words} ({numbers.points(self.difference)})" if self.difference else words


def verdict(run: RunData) -> str:
    """The sentence; empty for a run without answers."""
    if run.evaluation is not None:
        parts = _evaluated(run.evaluation)
    else:
        parts = [_learning(run), _waiting(run), _failures(run)]
    said = "; ".join(part for part in parts if part)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def _learning(run: RunData) -> str:
    if not run.updates and run.training:
        return "nothing was trained on yet"
    found = [change for change in (heldout(run), training(run)) if change is not None]
    if not found:
        return ""
    if len(found) == 2 and found[0].label != found[1].label:
        return "; ".join(f"{change.label} in {change.in_figures}" for change in found)
    return f"{found[0].label}: {', '.join(change.in_figures for change in found)}"


def heldout(run: RunData) -> RateChange | None:
    """Correct answers to held-out problems before and after training; None where one is missing."""
    before, after = (by_problem(run.phase(phase)) for phase in (BEFORE, AFTER))
    if not before or not after:
        return None
    difference, _ = differences.paired(before, after)
    shares = [sum(map(sum, found.values())) / sum(map(len, found.values())) for found in (before, after)]
    return RateChange("held-out correct", shares[0], shares[1], difference)


def by_problem(answers: Sequence[RolloutStats]) -> dict[str, list[float]]:
    """Whether each answer is correct."""
    found: dict[str, list[float]] = defaultdict(list)
    for stats in answers:
        found[stats.problem_id].append(float(stats.correct))
    return found


def training(run: RunData) -> RateChange | None:
    """Correct answers of the first versions and of the last; None where there are none of both."""
    two = ends(settled(run.answers))
    if two.first is None or two.last is None:
        return None
    first, last = two.first.figures()["correct_rate"], two.last.figures()["correct_rate"]
    difference = differences.of_figures(first.value, first.interval, last.value, last.interval)
    which = " → ".join(part.versions.removeprefix("version").lstrip("s ") for part in (two.first, two.last))
    return RateChange(f"training correct (version {which})", first.value, last.value, difference)


def _waiting(run: RunData) -> str:
    found = waits(run)
    if found is None:
        return _busiest(run.summary.get("busy"))
    if found.slowest is None:
        return "no stage was at work most of the time"
    one = found.slowest
    words = f"the {STAGE_NAMES[Stage(one.stage)]} is what it waits for (busy {numbers.percent(one.busy)} of training"
    queue = f"; a rollout waits {numbers.seconds(one.waited)} before it, of {numbers.seconds(found.whole)} to its score"
    return f"{words}{queue if one.stage != Stage.TRAIN else ''})"


def _busiest(busy: object) -> str:
    """Of a run that kept no times of single rollouts."""
    if not isinstance(busy, Mapping) or not busy:
        return ""
    name = max(busy, key=lambda each: busy[each])
    return f"{str(name).replace('_', ' ')} was the busiest process ({numbers.percent(busy[name])})"


def _failures(run: RunData) -> str:
    """Of the last versions' answers."""
    two = ends(settled(run.answers))
    part = two.last or two.first
    if part is None:
        return ""
    failed = Counter(stats.fault for stats in part.stats if not stats.correct)
    if not failed:
        return f"none of the {len(part.answers):,} answers of {part.versions} failed"
    return _most(failed, len(part.answers), f"most failures of {part.versions}")


def _evaluated(document: Document) -> list[str]:
    """Of an evaluation: what is right, what several tries find, what is faster, and what fails."""
    figures = document.overall.raw
    if figures is None:
        return ["no answer has a verdict"]
    tries = [(f"pass@{k}", figure) for k, figure in figures.pass_at_k.items() if k != "1"][-1:]
    shown = [("correct", figures.correct), *tries, ("proven faster", figures.speedup[EAGER].fast_1_proven)]
    said = ", ".join(f"{name} {numbers.percent(figure.value)}{_ends(figure)}" for name, figure in shown)
    asked = f"of {numbers.count(figures.samples, 'answer')} to {numbers.count(figures.problems, 'problem')}"
    failed = Counter(sample.fault for sample in document.samples if not sample.correct)
    return [f"{said} {asked}", _most(failed, figures.samples, "most failures")]


def _ends(figure: Figure) -> str:
    """A bootstrap of problems that are all alike knows no interval."""
    return f" ({numbers.percent(figure.lo)} … {numbers.percent(figure.hi)})" if figure.lo < figure.hi else ""


def _most(failed: Counter[str], answers: int, words: str) -> str:
    said = [f"{_name(fault)} {numbers.percent(count / answers)}" for fault, count in failed.most_common(MOST_FAULTS)]
    return f"{words}: {', '.join(said)}" if said else ""


def _name(fault: str) -> str:
    return FAULT_NAMES.get(Fault(fault), fault) if fault in set(Fault) else fault or "wrong results"
