"""What the run was and came to, in figures that fit on one screen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Content, Markup, element, join
from kbrl_async.lab.report.model import RunData
from kbrl_async.runs.telemetry.by_version import Ends, ends, sentence, settled


def make(run: RunData) -> Markup:
    began = datetime.fromtimestamp(run.started_at, UTC).strftime("%Y-%m-%d %H:%M UTC") if run.started_at else ""
    what = [began, f"{numbers.seconds(run.duration)} in all" if run.duration else "", *_settings(run)]
    line = element("p", " · ".join(word for word in what if word), class_="subtitle")
    found = settled(run.answers)
    which = (
        element("p", f"Correct, faster and reward: {sentence(run.answers, found)}", class_="subtitle")
        if run.training
        else ""
    )
    return element(
        "header",
        element("p", "Run report", class_="kicker"),
        element("h1", run.name),
        line,
        _tiles(run, ends(found)),
        which,
        _notes(run),
    )


def _settings(run: RunData) -> list[str]:
    found = dict(line.split(": ", 1) for line in run.config.splitlines() if ": " in line and not line.startswith(" "))
    wanted = (("model_name", "model {}"), ("backend", "backend {}"), ("loss", "loss {}"), ("mode", "{}"))
    return [words.format(found[key].replace("_", " ")) for key, words in wanted if key in found]


def _tiles(run: RunData, two: Ends) -> Markup:
    s = run.summary
    best = run.kernels[0] if run.kernels else None
    tiles = [
        _compared("correct", two, "correct_rate", numbers.percent),
        _compared("fast_1_proven", two, "fast_1_proven", numbers.percent),
        _compared("reward", two, "reward_mean", numbers.plain),
        _tile(
            "best kernel",
            numbers.times(best.speedup if best else None),
            best.problem_id if best else "none correct yet",
        ),
        _tile("updates", numbers.plain(len(run.updates)), _rate(run)),
        _tile("rollouts", numbers.plain(float(len(run.training))), _groups(s)),
    ]
    return element("div", *tiles, class_="tiles")


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
