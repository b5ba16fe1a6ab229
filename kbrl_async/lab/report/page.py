"""Sections become one self-contained HTML page.

Invariants
* The page loads nothing: its content policy forbids every address, and every script but the one that it carries.
* It reads without a script; the script only sorts and shows values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from kbrl_async.evaluation.proportions import WORDS
from kbrl_async.lab.report import comparing
from kbrl_async.lab.report.comparing import Cell, Side
from kbrl_async.lab.report.curves import VERSION, curves, version_curves
from kbrl_async.lab.report.layout import VersionAxis, data_table, figure, grid, section
from kbrl_async.lab.report.markup import Content, Markup, element, join
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.plots import Series, line_chart
from kbrl_async.lab.report.sections import (
    evaluation,
    faults,
    heldout,
    kernels,
    learning,
    overview,
    pipeline,
    problems,
    rollouts,
    settings,
    timeline,
    turns,
)

SECTIONS: tuple[tuple[str, str, Callable[[RunData], Markup]], ...] = (
    ("evaluation", "Evaluation", evaluation.make),
    ("learning", "Learning", learning.make),
    ("heldout", "Held-out", heldout.make),
    ("kernels", "Kernels", kernels.make),
    ("problems", "Problems", problems.make),
    ("faults", "Faults", faults.make),
    ("turns", "Turns", turns.make),
    ("rollouts", "Rollouts", rollouts.make),
    ("timeline", "Timeline", timeline.make),
    ("system", "System", pipeline.make),
    ("settings", "Configuration", settings.make),
)

COMPARED = (
    ("version/reward_mean", "Reward"), ("version/compile_rate", "Compiles"), ("version/correct_rate", "Correct"),
    ("version/fast_1", "Faster"), ("version/fast_1_proven", "Proven faster"), ("version/speedup_mean", "Speedup"),
    ("version/success_rate", "Solved in a rollout"),
    ("staleness/versions_mean", "Staleness"), ("policy/entropy", "Entropy"), ("policy/loss", "Loss"),
    ("policy/grad_norm", "Gradient norm"),
)  # fmt: skip
"""Tag and title of the charts of a comparison: what a policy version wrote, and the learner's own by update."""

CURVES = (
    "Reward, rates and speedups are of the answers that a policy version wrote, whenever they were scored; what the "
    "learner reports stands at the version that the update made."
)


def report_page(run: RunData) -> str:
    """The report of a run, as the text of an HTML file."""
    made = [(key, name, make(run)) for key, name, make in SECTIONS]
    there = [(key, name, part) for key, name, part in made if part]
    links = element("nav", join(element("a", name, href=f"#{key}") for key, name, _ in there), aria_label="sections")
    return page(f"{run.name} · run report", links, overview.make(run), *(part for _, _, part in there))


def compare_page(runs: Mapping[str, Path], sides: Sequence[Side], window: int = 3) -> str:
    """Runs side by side. `sides`: those that have ended."""
    head = element(
        "header", element("p", "Comparison", class_="kicker"), element("h1", " · ".join(runs)),
        element("p", f"{len(runs)} runs; curves are means of {window} versions or updates", class_="subtitle"),
    )  # fmt: skip
    updates = [tag for tag, _ in COMPARED if not tag.startswith(VERSION)]
    by_run = {name: version_curves(path) | curves(path, updates) for name, path in runs.items()}
    last = max((x for tags in by_run.values() for found in tags.values() for x, _ in found), default=1.0)
    charts = [_compare_chart(by_run, tag, title, window, VersionAxis(round(last))) for tag, title in COMPARED]
    over_versions = section("curves", "Over policy versions", CURVES, grid(charts))
    return page("Runs compared", Markup(""), head, _compared(sides), _settings(sides), over_versions)


def _compared(sides: Sequence[Side]) -> Markup:
    if not sides:
        return Markup("")
    said = ["From runs that have ended.", *comparing.format_sides(sides)]
    if len(sides) > 1:
        said.append(
            f"The small lines are {WORDS} intervals, then the difference to {sides[0].name} with its own interval, "
            "over the problems that both were asked, paired (Student's), for held-out problems and evaluations, and of "
            "two independent figures over groups (MOVER) for training. Bold: more than chance, as one figure in twenty "
            "is by chance."
        )
    words = join(element("span", each, " ") for each in said)
    head = element("tr", element("th", ""), join(element("th", side.name, class_="n") for side in sides))
    return section("figures", "Figures", words, data_table(_compared_rows(sides), head))


def _compared_rows(sides: Sequence[Side]) -> Iterator[Markup]:
    part = ""
    for row in comparing.rows(sides):
        if row.part != part:
            yield element("tr", element("th", row.part, colspan=len(sides) + 1, class_="part"))
            part = row.part
        yield element("tr", element("td", row.name), join(map(_compared_cell, row.cells)))


def _compared_cell(cell: Cell) -> Markup:
    difference = element("b" if cell.is_told else "span", cell.difference)
    small = [element("br") + element("small", line) for line in (cell.interval, difference) if line]
    return element("td", cell.value, *small, class_="n")


def _settings(sides: Sequence[Side]) -> Markup:
    found = comparing.settings(sides)
    if not found:
        return Markup("")
    head = element("tr", element("th", "setting"), join(element("th", side.name, class_="n") for side in sides))
    lines = [
        element("tr", element("td", key), join(element("td", value, class_="n") for value in values))
        for key, values in found
    ]
    return section("settings", "Settings that differ", "All others are the same.", data_table(lines, head))


def _compare_chart(
    by_run: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    tag: str,
    title: str,
    window: int,
    axis: VersionAxis,
) -> Markup:
    lines = [
        Series(name, curves[tag], f"c{i % 8 + 1}", window=window) for i, (name, curves) in enumerate(by_run.items())
    ]
    if not any(line.points for line in lines):
        return Markup("")
    words = f"{title} by policy version"
    chart = line_chart(lines, label=words, labels="names", x_ends=axis.ends, x_ticks=axis.ticks())
    return figure(title, tag, chart)


def page(title: str, links: Content, *parts: Content) -> str:
    """The whole document."""
    script, style = _asset("page.js"), _asset("theme.css") + _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element("body", links, element("main", *parts, _footer()), element("script", Markup(script)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _asset(name: str) -> Markup:
    return Markup(files("kbrl_async.lab.report").joinpath(name).read_text(encoding="utf-8"))


def _footer() -> Markup:
    return element("footer", "Made by kbrl report; this file needs no network.")
