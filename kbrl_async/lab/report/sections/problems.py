"""Each problem by policy version: which version first solved it, and which wrote kernels faster than the reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import axis_row, cells, choice, figure, row, rows, section, version_ticks
from kbrl_async.lab.report.markup import Markup, element, join
from kbrl_async.lab.report.model import RunData
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry.by_version import Part, points, settled

COLUMNS = 40
MOST = 300


def make(run: RunData) -> Markup:
    parts = points(settled(run.answers), COLUMNS)
    by_problem: dict[str, list[list[RolloutStats]]] = defaultdict(lambda: [[] for _ in parts])
    for number, part in enumerate(parts):
        for stats in part.stats:
            by_problem[stats.problem_id][number].append(stats)
    if not by_problem:
        return Markup("")
    views = [
        ("correct", _heat(parts, by_problem, HeatView("correct", "correct", lambda s: s.correct))),
        ("faster than the reference", _heat(parts, by_problem, HeatView("fast", "faster", lambda s: s.fast_1_proven))),
        ("compiles", _heat(parts, by_problem, HeatView("compile", "compile", lambda s: s.compiled))),
    ]
    left = f" The {MOST} with most answers are shown." if len(by_problem) > MOST else ""
    intro = (
        f"{numbers.count(len(by_problem), 'training problem')}, a row each, by the policy version that wrote the "
        "answers: pale where it was tried without success, darker the more of its answers succeeded, empty where it "
        f"was not tried.{left}"
    )
    return section("problems", "Problem by problem", intro, choice("heat", views))


class HeatView(msgspec.Struct, frozen=True):
    """What a cell says: the share of its answers that are `good`."""

    shade: str
    words: str
    is_good: Callable[[RolloutStats], bool]


def _heat(parts: Sequence[Part], by_problem: dict[str, list[list[RolloutStats]]], view: HeatView) -> Markup:
    ordered = sorted(by_problem, key=lambda problem: -sum(map(len, by_problem[problem])))[:MOST]
    made = [_row(parts, problem, by_problem[problem], view) for problem in sorted(ordered)]
    chart = [*made, axis_row(_axis(parts), "in all")]
    key = element("p", "none ", _scale(view.shade), " all", class_="legend")
    return figure("", "", key, rows(chart, label=f"share {view.words} by problem and policy version", kind="heat"))


def _axis(parts: Sequence[Part]) -> list[tuple[float, str]]:
    """Round versions at the beginnings of their cells."""
    ticks = version_ticks(parts, 8)
    places = [(next(i for i, part in enumerate(parts) if tick <= part.last), tick) for tick in ticks]
    return [(100 * place / len(parts), f"v{tick:.0f}") for place, tick in places]


def _scale(shade: str) -> Markup:
    return element("span", join(element("i", class_=f"key {shade} s{level}") for level in range(6)), class_="ramp")


def _row(parts: Sequence[Part], problem: str, found: Sequence[Sequence[RolloutStats]], view: HeatView) -> Markup:
    values = [_cell(problem, part, members, view) for part, members in zip(parts, found, strict=True)]
    bars, tips = cells(values, view.shade)
    answers = [stats for members in found for stats in members]
    share = sum(map(view.is_good, answers)) / len(answers)
    return row(problem, bars, value=numbers.percent(share), tips=tips)


def _cell(problem: str, part: Part, found: Sequence[RolloutStats], view: HeatView) -> tuple[float, str] | None:
    if not found:
        return None
    good = sum(map(view.is_good, found))
    return good / len(found), f"{problem}, {part.versions}: {good} of {len(found)} {view.words}"
