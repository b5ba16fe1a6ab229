"""Each problem by policy version: which version first solved it, and which wrote kernels faster than the reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import VersionAxis, axis_row, cells, choice, figure, row, rows, section, version_axis
from kbrl_async.lab.report.markup import Markup, element, join
from kbrl_async.lab.report.model import RunData
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry.by_version import settled

COLUMNS = 40
MOST = 300


def make(run: RunData) -> Markup:
    found = settled(run.answers)
    axis = version_axis(run)
    size = -(-(axis.last + 1) // COLUMNS)
    columns = [range(first, min(first + size, axis.last + 1)) for first in range(0, axis.last + 1, size)]
    by_problem: dict[str, list[list[RolloutStats]]] = defaultdict(lambda: [[] for _ in columns])
    for version, answers in found.versions.items():
        for answer in answers:
            by_problem[answer.stats.problem_id][version // size].append(answer.stats)
    if not by_problem:
        return Markup("")
    views = [
        _heat(axis, columns, by_problem, view)
        for view in (
            HeatView("correct", "correct", "correct", lambda s: s.correct),
            HeatView("proven faster than the reference", "fast", "proven faster", lambda s: s.fast_1_proven),
            HeatView("compiles", "compile", "compile", lambda s: s.compiled),
        )
    ]
    left = f" The {MOST} with most answers are shown." if len(by_problem) > MOST else ""
    intro = (
        f"{numbers.count(len(by_problem), 'training problem')}, a row each, by the policy version that wrote the "
        "answers: pale where it was tried without success, darker the more of its answers succeeded, empty where it "
        f"was not tried, or where not all answers of a version are in.{left}"
    )
    return section("problems", "Problem by problem", intro, choice("heat", views))


class HeatView(msgspec.Struct, frozen=True):
    """What a cell says: the share of its answers that are `good`."""

    title: str
    shade: str
    words: str
    is_good: Callable[[RolloutStats], bool]


def _heat(
    axis: VersionAxis, columns: Sequence[range], by_problem: dict[str, list[list[RolloutStats]]], view: HeatView
) -> tuple[str, Markup]:
    ordered = sorted(by_problem, key=lambda problem: -sum(map(len, by_problem[problem])))[:MOST]
    made = [_row(columns, problem, by_problem[problem], view) for problem in sorted(ordered)]
    ticks = [(100 * (int(tick) // len(columns[0])) / len(columns), f"v{tick:.0f}") for tick in axis.ticks(8)]
    key = element("p", "none ", _scale(view.shade), " all", class_="legend")
    label = f"share {view.words} by problem and policy version"
    return view.title, figure("", "", key, rows([*made, axis_row(ticks, "in all")], label=label, kind="heat"))


def _scale(shade: str) -> Markup:
    return element("span", join(element("i", class_=f"key {shade} s{level}") for level in range(6)), class_="ramp")


def _row(columns: Sequence[range], problem: str, found: Sequence[Sequence[RolloutStats]], view: HeatView) -> Markup:
    values = [_cell(problem, part, members, view) for part, members in zip(columns, found, strict=True)]
    bars, tips = cells(values, view.shade)
    answers = [stats for members in found for stats in members]
    share = sum(map(view.is_good, answers)) / len(answers)
    return row(problem, bars, value=numbers.percent(share), tips=tips)


def _cell(problem: str, part: range, found: Sequence[RolloutStats], view: HeatView) -> tuple[float, str] | None:
    if not found:
        return None
    good = sum(map(view.is_good, found))
    versions = f"version {part[0]}" if len(part) == 1 else f"versions {part[0]}–{part[-1]}"
    return good / len(found), f"{problem}, {versions}: {good} of {len(found)} {view.words}"
