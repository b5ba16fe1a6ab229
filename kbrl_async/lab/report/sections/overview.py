"""What the run was and came to, in figures that fit on one screen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kbrl_async.evaluation.document import Document
from kbrl_async.evaluation.metrics import EAGER, Figure
from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Content, Markup, element, join
from kbrl_async.lab.report.model import BestKernel, RunData
from kbrl_async.lab.report.verdict import verdict
from kbrl_async.runs.telemetry.by_version import Ends, ends, sentence, settled
from protocols.records import TIMING_CONFIDENCE


def make(run: RunData) -> Markup:
    began = datetime.fromtimestamp(run.started_at, UTC).strftime("%Y-%m-%d %H:%M UTC") if run.started_at else ""
    what = [began, f"{numbers.seconds(run.duration)} in all" if run.duration else "", *_settings(run)]
    line = element("p", " · ".join(word for word in what if word), class_="subtitle")
    found = settled(run.answers)
    which = (
        element("p", f"Correct, proven faster and reward: {sentence(run.answers, found)}", class_="subtitle")
        if run.training
        else ""
    )
    return element(
        "header",
        element("p", "Run report", class_="kicker"),
        element("h1", run.name),
        line,
        element("p", said, class_="verdict") if (said := verdict(run)) else "",
        element("div", *(_evaluated(run.evaluation) if run.evaluation else _tiles(run, ends(found))), class_="tiles"),
        which,
        _notes(run),
    )


def _settings(run: RunData) -> list[str]:
    found = dict(line.split(": ", 1) for line in run.config.splitlines() if ": " in line and not line.startswith(" "))
    wanted = (("model_name", "model {}"), ("backend", "backend {}"), ("loss", "loss {}"), ("mode", "{}"))
    return [words.format(found[key].replace("_", " ")) for key, words in wanted if key in found]


def _tiles(run: RunData, two: Ends) -> list[Markup]:
    s = run.summary
    best = next((kernel for kernel in run.kernels if kernel.lo > 1), None)
    return [
        _compared("correct", two, "correct_rate", numbers.percent),
        _compared("proven faster", two, "fast_1_proven", numbers.percent),
        _compared("reward", two, "reward_mean", numbers.plain),
        _best(best),
        _tile("updates", numbers.plain(len(run.updates)), _rate(run)),
        _tile("rollouts", numbers.plain(float(len(run.training))), _groups(s)),
    ]


def _evaluated(document: Document) -> list[Markup]:
    figures = document.overall.raw
    if figures is None:
        return []
    eager = figures.speedup[EAGER]
    shown = {
        "correct": figures.correct, **{f"pass@{k}": figure for k, figure in list(figures.pass_at_k.items())[-1:]},
        "fast_1": eager.fast_p["1"], "proven faster": eager.fast_1_proven,
    }  # fmt: skip
    tiles = [_tile(name, numbers.percent(one.value), _ends(one, numbers.percent)) for name, one in shown.items()]
    if (mean := eager.geometric_mean) is not None:
        tiles.append(_tile("speedup of correct kernels", numbers.times(mean.value), _ends(mean, numbers.times)))
    asked = f"to {numbers.count(figures.problems, 'problem')}; {sum(document.lost.values())} lost"
    return [*tiles, _tile("answers", numbers.plain(figures.samples), asked)]


def _ends(one: Figure, shown: Callable[[float | None], str]) -> str:
    return f"{shown(one.lo)} … {shown(one.hi)}" if one.lo < one.hi else "alike in every problem"


def _best(best: BestKernel | None) -> Markup:
    """A kernel is called fastest only where its whole interval says so."""
    if best is None:
        return _tile("fastest proven kernel", "none", "no kernel's whole interval lies above 1×")
    ends = f"{numbers.times(best.lo)} … {numbers.times(best.hi)}"
    return _tile(
        "fastest proven kernel",
        numbers.times(best.speedup),
        f"{best.problem_id} ({ends}, {100 * TIMING_CONFIDENCE:.0f} %)",
    )


def _tile(name: str, value: str, note: str) -> Markup:
    return element("div", element("span", name), element("b", value), element("small", note), class_="tile")


def _compared(name: str, two: Ends, field: str, shown: Callable[[float | None], str]) -> Markup:
    """The last versions' figure, with that of the first ones below it."""
    told, value = [], "–"
    for part in (two.last, two.first):
        found = part.figures().get(field) if part else None
        if part is None or found is None:
            continue
        value = shown(found.value) if part is two.last else value
        own = "" if part is two.last else f" {shown(found.value)}"
        interval = f" ({shown(found.interval[0])} … {shown(found.interval[1])})" if found.interval else ""
        told.append(f"{part.versions}{own}{interval}")
    return _tile(name, value, "; ".join(told) or "no version has all of its answers yet")


def _rate(run: RunData) -> str:
    rate = run.summary.get("updates_per_hour")
    oldest = max((turn.stats.staleness or 0 for turn in run.training), default=0)
    said = f"{rate:.0f} an hour; " if rate else ""
    return f"{said}oldest data {numbers.count(oldest, 'version')} behind"


def _groups(summary: Any) -> str:
    if "groups_admitted" not in summary:
        return "so far"
    ends = {name: summary.get(f"groups_{name}") for name in ("trained", "filtered", "dropped_stale", "failed")}
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in ends.items() if count)
    mark = "" if summary.get("groups_add_up", True) else " (these do not add up)"
    return f"{summary['groups_admitted']} groups: {said or 'none ended'}{mark}"


def _notes(run: RunData) -> Content:
    if not run.missing:
        return ""
    title = element("b", "What this report lacks")
    return element("aside", title, element("ul", join(element("li", words) for words in run.missing)), class_="note")
