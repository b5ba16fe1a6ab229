"""Runs and evaluations side by side: what each came to in words, how far they are apart, and what was set differently.

::

    RUN/ summary.json, journal, evaluation.json, config.yaml ─ read ─▶ Side ─┬─ rows ──────▶ figures and differences
                                                                             ├─ told ──────▶ which answers they are of
                                                                             └─ settings ──▶ keys that differ

Invariants
* A difference is to the first run and has an interval of its own (`differences`): over the problems that both were
  asked, paired, for held-out problems and evaluations; over groups of answers for training.
* What one of the runs lacks is a dash, never a guess.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.table import Table

from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.evaluation import document, metrics
from kbrl_async.evaluation.document import Document, Figures
from kbrl_async.evaluation.metrics import EAGER, Figure, Sample, pass_at_k, sample_of
from kbrl_async.evaluation.proportions import KEY, WORDS
from kbrl_async.lab.report import differences, numbers
from kbrl_async.lab.report.curves import SOLVED
from kbrl_async.lab.report.differences import Delta, Interval
from kbrl_async.lab.report.journal import FILE as JOURNAL_FILE
from kbrl_async.lab.report.journal import read_journal
from kbrl_async.lab.report.model import AFTER, BEFORE
from kbrl_async.runs import summary
from kbrl_async.runs.telemetry import logs

UNSAID = frozenset({"name", "resume"})
"""Settings that differ between any two runs."""
CONFIG_FILE = "config.yaml"

PASSED = f"pass_at_{summary.TRIES}"
WHAT = {
    "reward_mean": "reward", "compile_rate": "compiles", "correct_rate": "correct",
    PASSED: f"pass@{summary.TRIES}", SOLVED: "solved in a rollout",
    "fast_1": "fast_1", "fast_1_proven": "proven faster", "speedup_mean": "speedup of correct kernels",
}  # fmt: skip
"""Figures of `summary.json` in words."""
FACTS = {
    "method": "method", "preset": "preset", "seed": "seed", "updates": "updates", "rollouts": "training rollouts",
    "lessons": "lessons", "wall_s": "training time", "updates_per_hour": "updates an hour",
    "max_staleness": "oldest data, versions",
}  # fmt: skip
HELDOUT: Mapping[str, Callable[[Sample], float | None]] = {
    "compile_rate": lambda s: s.compiled,
    "correct_rate": lambda s: s.correct,
    "fast_1": lambda s: (s.speedup() or 0.0) > 1,
    "fast_1_proven": metrics.is_proven_faster,
    "speedup_mean": lambda s: None if s.speedup() is None else math.log(s.speedup() or 1.0),
}
"""What a sample is worth; None: it does not count."""
EVALUATION = "evaluation"
EVALUATED: Mapping[str, Callable[[Figures], Figure | None]] = {
    "compile_rate": lambda found: found.compiled,
    "correct_rate": lambda found: found.correct,
    "fast_1": lambda found: found.speedup[EAGER].fast_p["1"],
    "fast_1_proven": lambda found: found.speedup[EAGER].fast_1_proven,
    "speedup_mean": lambda found: found.speedup[EAGER].geometric_mean,
}
"""Of an evaluation's figures."""

Samples = Mapping[str, Sequence[Sample]]
"""By problem."""


class Side(msgspec.Struct, frozen=True):
    """One run or evaluation."""

    name: str
    summary: Mapping[str, Any]
    config: Mapping[str, str] = {}
    """Its settings by their whole names."""
    heldout: Mapping[str, Samples] = {}
    """By phase, before and after."""
    evaluation: Document | None = None


class Cell(msgspec.Struct, frozen=True):
    """What a run says of a figure."""

    value: str = "–"
    interval: str = ""
    difference: str = ""
    """To the first run."""
    is_told: bool = False
    """The difference can be told from chance."""


class ComparedFigure(msgspec.Struct, frozen=True):
    """One figure of all runs."""

    part: str
    """Training, held-out problems, …"""
    name: str
    cells: Sequence[Cell]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(paths: Mapping[str, Path]) -> list[Side]:
    """Runs that have ended, by name.

    :raises UserError: a summary can't be read.
    """
    return [_side(name, path) for name, path in paths.items()]


def _side(name: str, path: Path) -> Side:
    try:
        found = summary.by_versions(summary.read(path / "summary.json"))
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path / 'summary.json'} can't be read: {error}", "Restore it from a copy") from None
    heldout: dict[str, dict[str, list[Sample]]] = {BEFORE: defaultdict(list), AFTER: defaultdict(list)}
    journal = read_journal(path / JOURNAL_FILE)
    for turn in journal.turns if journal else ():
        if turn.phase in heldout:
            heldout[turn.phase][turn.stats.problem_id].append(sample_of(turn.stats))
    return Side(name, found, _settings(path / CONFIG_FILE), heldout, _evaluation(path))


def _evaluation(path: Path) -> Document | None:
    try:
        return document.read(path / document.FILE) if (path / document.FILE).is_file() else None
    except CheckpointError as error:
        raise UserError(str(error), "Evaluate again with 'kbrl eval'") from None


def _settings(path: Path) -> dict[str, str]:
    """By whole names, secrets blanked; none of a file that can't be read."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return _flat(dict(logs.redact(None, "", found))) if isinstance(found, dict) else {}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = "–" if value is None else str(value)
    return out


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────


def settings(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of the settings that differ."""
    keys = sorted({key for side in sides for key in side.config} - UNSAID)
    found = [(key, [side.config.get(key, "–") for side in sides]) for key in keys]
    return [(key, values) for key, values in found if len(set(values)) > 1]


def format_sides(sides: Sequence[Side]) -> list[str]:
    """Of each run: which answers its first and last figures are of."""
    return [
        f"{side.name}: {summary.format_first_and_last(side.summary)}" for side in sides if side.summary.get("rollouts")
    ]


def rows(sides: Sequence[Side]) -> list[ComparedFigure]:
    """All figures that any run has."""
    found = [_fact(sides, field, words) for field, words in FACTS.items()]
    for end in ("first", "last"):
        found.append(_answers(sides, end))
        found += [_training(sides, field, end) for field in WHAT]
    for phase in (BEFORE, AFTER):
        found += [_heldout(sides, field, phase) for field in (*HELDOUT, PASSED)]
        found += [_heldout(sides, field, phase, kind) for kind in summary.KINDS for field in summary.BY_KIND]
    found += _evaluations(sides)
    return [row for row in found if any(cell.value != "–" for cell in row.cells)]


def _fact(sides: Sequence[Side], field: str, words: str) -> ComparedFigure:
    values = [side.summary.get(field, side.summary.get("demonstrations", {}).get(field)) for side in sides]
    return ComparedFigure("the run", words, [Cell(_format(field, value)) for value in values])


def _answers(sides: Sequence[Side], end: str) -> ComparedFigure:
    """How many they are, and of which versions."""
    cells = [Cell()] * len(sides)
    for place, side in enumerate(sides):
        if versions := side.summary.get(f"versions_{end}"):
            which = "–".join(str(version) for version in dict.fromkeys(versions))
            cells[place] = Cell(f"{side.summary.get(f'answers_{end}')} of v{which}")
    return ComparedFigure(f"training, {end} versions", "answers", cells)


def _training(sides: Sequence[Side], field: str, end: str) -> ComparedFigure:
    key = f"{field}_{end}"
    found = [(side.summary.get(key), _interval(side.summary, key)) for side in sides]
    apart = [None, *(_of_two(field, *found[0], *other) for other in found[1:])]
    cells = [_cell(field, *one, difference) for one, difference in zip(found, apart, strict=True)]
    return ComparedFigure(f"training, {end} versions", WHAT[field], cells)


def _of_two(
    field: str, first: float | None, around_first: Interval | None, second: float | None, around: Interval | None
) -> Delta | None:
    if first is None or second is None:
        return None
    of = differences.of_ratios if _is_factor(field) else differences.of_figures
    return of(first, around_first, second, around)


def _heldout(sides: Sequence[Side], field: str, phase: str, kind: str = "") -> ComparedFigure:
    """`kind`: of these held-out problems only."""
    when = phase.removeprefix("eval-")
    key = f"heldout_{kind}_{field}_{when}" if kind else f"heldout_{field}_{when}"
    asked = [_of_kind(side, phase, kind) for side in sides]
    apart = [None, *(_heldout_apart(field, asked[0], other) for other in asked[1:])]
    cells = [
        _cell(field, side.summary.get(key), _interval(side.summary, key), difference)
        for side, difference in zip(sides, apart, strict=True)
    ]
    return ComparedFigure(f"held-out{f', {summary.KINDS[kind]}' if kind else ''}, {when} training", WHAT[field], cells)


def _of_kind(side: Side, phase: str, kind: str) -> Samples:
    kinds, found = side.summary.get("heldout_kinds") or {}, side.heldout.get(phase, {})
    return {name: of for name, of in found.items() if kinds.get(name) == kind} if kind else found


def _heldout_apart(field: str, first: Samples, second: Samples) -> Delta | None:
    if field == PASSED:
        return differences.paired(_chances(first, summary.TRIES), _chances(second, summary.TRIES))[0]
    return _paired(first, second, HELDOUT[field])


def _interval(found: Mapping[str, Any], key: str) -> Interval | None:
    ends = found.get(f"{key}{KEY}")
    return (ends[0], ends[1]) if ends else None


def _paired(first: Samples, second: Samples, worth: Callable[[Sample], float | None]) -> Delta | None:
    found: list[dict[str, list[float]]] = [{}, {}]
    for values, samples in zip(found, (first, second), strict=True):
        for problem, answers in samples.items():
            if counted := [float(value) for sample in answers if (value := worth(sample)) is not None]:
                values[problem] = counted
    return differences.paired(found[0], found[1])[0]


def _evaluations(sides: Sequence[Side]) -> list[ComparedFigure]:
    """What `kbrl eval` found: each problem counts alike."""
    found = [side.evaluation.overall.raw if side.evaluation else None for side in sides]
    if not any(found):
        return []
    asked = [
        {group[0].problem_id: group for group in metrics.by_problem(side.evaluation.samples)} if side.evaluation else {}
        for side in sides
    ]
    sizes = [Cell(f"{one.problems} × {one.samples / one.problems:g}" if one else "–") for one in found]
    tries = sorted({int(k) for one in found if one for k in one.pass_at_k} - {1})
    made = [ComparedFigure(EVALUATION, "problems × answers", sizes)]
    for field, of in EVALUATED.items():
        made.append(_evaluated(field, asked, [of(one) if one else None for one in found]))
        if field == "correct_rate":
            made += [_passed(k, asked, [one.pass_at_k.get(str(k)) if one else None for one in found]) for k in tries]
    return made


def _evaluated(field: str, asked: Sequence[Samples], found: Sequence[Figure | None]) -> ComparedFigure:
    apart = [_paired(asked[0], samples, HELDOUT[field]) for samples in asked[1:]]
    return ComparedFigure(EVALUATION, WHAT[field], _figures(field, found, apart))


def _passed(k: int, asked: Sequence[Samples], found: Sequence[Figure | None]) -> ComparedFigure:
    """Each problem's own chance is the value that is paired."""
    chances = [_chances(samples, k) for samples in asked]
    apart = [differences.paired(chances[0], of)[0] for of in chances[1:]]
    return ComparedFigure(EVALUATION, f"pass@{k}", _figures("pass", found, apart))


def _chances(samples: Samples, k: int) -> dict[str, list[float]]:
    """By problem, that one of k answers is correct; without those that have fewer."""
    return {name: [pass_at_k(len(of), sum(s.correct for s in of), k)] for name, of in samples.items() if len(of) >= k}


def _figures(field: str, found: Sequence[Figure | None], apart: Sequence[Delta | None]) -> list[Cell]:
    """A bootstrap of problems that are all alike knows no interval."""
    ends = [(one.lo, one.hi) if one and one.lo < one.hi else None for one in found]
    return [
        _cell(field, one.value if one else None, around, difference)
        for one, around, difference in zip(found, ends, [None, *apart], strict=True)
    ]


# ── in words ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_factor(field: str) -> bool:
    return field.startswith("speedup")


def _cell(field: str, value: float | None, around: Interval | None, apart: Delta | None) -> Cell:
    if value is None:
        return Cell()
    interval = f"{_format(field, around[0])} … {_format(field, around[1])}" if around else ""
    if apart is None:
        return Cell(_format(field, value), interval)
    return Cell(_format(field, value), interval, _apart(field, apart), apart.is_told)


def _apart(field: str, apart: Delta) -> str:
    if _is_factor(field):
        return "× {:.2f}, {:.2f} … {:.2f}".format(*map(math.exp, apart))
    if field == "reward_mean":
        return "{:+.3f}, {:+.3f} … {:+.3f}".format(*apart).replace("-", "−")
    return numbers.points(apart)


def _format(field: str, value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    if _is_factor(field):
        return numbers.times(value)
    if field == "wall_s":
        return numbers.seconds(value)
    if field in ("reward_mean", "updates_per_hour"):
        return numbers.plain(value)
    return numbers.percent(value)


def table(sides: Sequence[Side]) -> Table:
    """One column a run; below a run's value its interval, and below that how far it is from the first run."""
    made = Table(title="Runs compared", title_justify="left", caption=_caption(sides), caption_justify="left")
    made.add_column("")
    for side in sides:
        made.add_column(side.name, justify="right", overflow="fold")
    part = ""
    for row in rows(sides):
        if row.part != part:
            made.add_section()
            made.add_row(row.part, style="bold")
            part = row.part
        made.add_row(row.name, *map(_lines, row.cells))
    return made


def _lines(cell: Cell) -> str:
    difference = f"[bold]{cell.difference}[/bold]" if cell.is_told else cell.difference
    return "\n".join(line for line in (cell.value, cell.interval, difference) if line)


def _caption(sides: Sequence[Side]) -> str:
    if len(sides) < 2:
        return ""
    return (
        f"Below each value its {WORDS} interval, then the difference to {sides[0].name} with an interval of its own; "
        "bold: more than chance, as one figure in twenty is by chance."
    )


def settings_table(sides: Sequence[Side]) -> Table | None:
    """None where nothing differs."""
    found = settings(sides)
    if not found:
        return None
    made = Table(title="Settings that differ", title_justify="left")
    made.add_column("", overflow="fold")
    for side in sides:
        made.add_column(side.name, justify="right", overflow="fold")
    for key, values in found:
        made.add_row(key, *values)
    return made
