"""Each problem over time: when it was first solved, and when its kernels became faster than the reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Markup, element, join
from kbrl_async.lab.report.model import RunData, Turn
from kbrl_async.lab.report.plots import axis_row, binned, cells, row, rows, time_label
from kbrl_async.lab.report.sections.columns import start_of_training
from kbrl_async.lab.report.sections.layout import choice, figure, section, time_axis

COLUMNS = 40
MOST = 300


def make(run: RunData) -> Markup:
    by_problem: dict[str, list[Turn]] = defaultdict(list)
    for turn in run.training:
        if turn.at is not None:
            by_problem[turn.stats.problem_id].append(turn)
    if not by_problem:
        return Markup("")
    start = start_of_training(run)
    views = [
        ("correct", _heat(run, by_problem, View("correct", "correct", lambda turn: turn.stats.correct, start))),
        (
            "faster than the reference",
            _heat(run, by_problem, View("fast", "faster", lambda turn: turn.stats.fast, start)),
        ),
        ("compiles", _heat(run, by_problem, View("compile", "compile", lambda turn: turn.stats.compiled, start))),
    ]
    left = f" The {MOST} with most rollouts are shown." if len(by_problem) > MOST else ""
    intro = (
        f"{numbers.count(len(by_problem), 'training problem')}, a row each, over the time of training: pale where it "
        f"was tried without success, darker the more of its rollouts succeeded, empty where it was not tried.{left}"
    )
    return section("problems", "Problem by problem", intro, choice("heat", views))


class View(msgspec.Struct, frozen=True):
    """What a cell says: the share of its rollouts that are `good`."""

    shade: str
    words: str
    is_good: Callable[[Turn], bool]
    start: float
    """Of training."""


def _heat(run: RunData, by_problem: dict[str, list[Turn]], view: View) -> Markup:
    ordered = sorted(by_problem, key=lambda problem: -len(by_problem[problem]))[:MOST]
    made = [_row(run, problem, by_problem[problem], view) for problem in sorted(ordered)]
    chart = [*made, axis_row(time_axis(run, view.start), "in all")]
    key = element("p", "none ", _scale(view.shade), " all", class_="legend")
    return figure("", "", key, rows(chart, label=f"share {view.words} by problem over time", kind="heat"))


def _scale(shade: str) -> Markup:
    return element("span", join(element("i", class_=f"key {shade} s{level}") for level in range(6)), class_="ramp")


def _row(run: RunData, problem: str, turns: Sequence[Turn], view: View) -> Markup:
    parts = binned(turns, lambda turn: turn.at or 0.0, COLUMNS, view.start, run.duration)
    values = [_cell(run, number, part, view) for number, part in enumerate(parts)]
    bars, tips = cells(values, view.shade)
    share = sum(map(view.is_good, turns)) / len(turns)
    return row(problem, bars, value=numbers.percent(share), tips=tips)


def _cell(run: RunData, number: int, turns: Sequence[Turn], view: View) -> tuple[float, str] | None:
    if not turns:
        return None
    good = sum(map(view.is_good, turns))
    when = time_label(round(view.start + number * (run.duration - view.start) / COLUMNS))
    return good / len(turns), f"{turns[0].stats.problem_id} at {when}: {good} of {len(turns)} {view.words}"
