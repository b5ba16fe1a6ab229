"""Sections become one self-contained HTML page.

Invariants
* The page loads nothing: its content policy forbids every address, and every script but the one that it carries.
* It reads without a script; the script only sorts and shows values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from kbrl_async.lab.report import comparing
from kbrl_async.lab.report.layout import data_table, figure, grid, section
from kbrl_async.lab.report.markup import Content, Markup, element, join
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.plots import Line, line_chart
from kbrl_async.lab.report.sections import (
    faults,
    heldout,
    kernels,
    learning,
    overview,
    pipeline,
    problems,
    settings,
    timeline,
    turns,
)

SECTIONS: tuple[tuple[str, str, Callable[[RunData], Markup]], ...] = (
    ("learning", "Learning", learning.make),
    ("heldout", "Held-out", heldout.make),
    ("kernels", "Kernels", kernels.make),
    ("problems", "Problems", problems.make),
    ("faults", "Faults", faults.make),
    ("turns", "Turns", turns.make),
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
    "learner reports is of the batch of an update."
)


def report_page(run: RunData) -> str:
    """The report of a run, as the text of an HTML file."""
    made = [(key, name, make(run)) for key, name, make in SECTIONS]
    there = [(key, name, part) for key, name, part in made if part]
    links = element("nav", join(element("a", name, href=f"#{key}") for key, name, _ in there), aria_label="sections")
    return page(f"{run.name} · run report", links, overview.make(run), *(part for _, _, part in there))


def compare_page(runs: Mapping[str, Path], summaries: Mapping[str, Mapping[str, Any]], window: int = 3) -> str:
    """Runs side by side. `summaries`: of those that have ended."""
    head = element(
        "header", element("p", "Comparison", class_="kicker"), element("h1", " · ".join(runs)),
        element("p", f"{len(runs)} runs; curves are means of {window} versions or updates", class_="subtitle"),
    )  # fmt: skip
    body = (
        [section("figures", "Figures", _compared_in_words(summaries), _compare_table(summaries))] if summaries else []
    )
    updates = [tag for tag, _ in COMPARED if not tag.startswith(comparing.VERSION)]
    by_run = {name: comparing.version_curves(path) | comparing.curves(path, updates) for name, path in runs.items()}
    charts = [_compare_chart(by_run, tag, title, window) for tag, title in COMPARED]
    curves = section("curves", "Over versions and updates", CURVES, grid(charts))
    return page("Runs compared", Markup(""), head, *body, curves)


def _compared_in_words(summaries: Mapping[str, Mapping[str, Any]]) -> Markup:
    said = ["From the summaries of the runs that have ended.", *comparing.told(summaries)]
    return join(element("span", words, " ") for words in said)


def _compare_table(summaries: Mapping[str, Mapping[str, Any]]) -> Markup:
    head = element("tr", element("th", ""), join(element("th", name, class_="n") for name in summaries))
    lines = [
        element(
            "tr",
            element("th", field.replace("_", " ")),
            join(element("td", value, class_="n") for value in values),
        )
        for field, values in comparing.rows(summaries)
    ]
    return data_table(lines, head)


def _compare_chart(
    by_run: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], tag: str, title: str, window: int
) -> Markup:
    lines = [Line(name, curves[tag], f"c{i % 8 + 1}", window=window) for i, (name, curves) in enumerate(by_run.items())]
    if not any(line.points for line in lines):
        return Markup("")
    by = "policy version" if tag.startswith(comparing.VERSION) else "update"
    return figure(title, f"{tag}, by {by}", line_chart(lines, label=f"{title} by {by}", labels="names"))


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
