"""Problems that were never trained on, before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import axis_row, dumbbell, figure, grid, legend, rows, section
from kbrl_async.lab.report.markup import Markup, element
from kbrl_async.lab.report.model import AFTER, BEFORE, ROUND, RunData
from kbrl_async.lab.report.plots import Line, line_chart
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry.training_metrics import outcome_rates

RATES = (("compile_rate", "compiles"), ("correct_rate", "correct"), ("fast_1_proven", "proven"))
AXIS = ((0.0, "0"), (50.0, "50"), (100.0, "100 %"))
MOST = 40


def make(run: RunData) -> Markup:
    before, after = run.phase(BEFORE), run.phase(AFTER)
    problems = numbers.count(len({s.problem_id for s in before or after}), "problem")
    first, last = numbers.count(len(before), "time"), numbers.count(len(after), "time")
    intro = (
        f"The same {problems}, which training never sees, answered {first} by the first policy and {last} by the last."
    )
    if not before and not after:
        return Markup("")
    key = legend([("none", "before"), ("correct", "after")])
    return section(
        "heldout",
        "Held-out problems",
        intro,
        key,
        grid([_rates(before, after), _problems(before, after), _rounds(run)], "grid two"),
    )


def _rates(before: Sequence[RolloutStats], after: Sequence[RolloutStats]) -> Markup:
    first, last = outcome_rates(before), outcome_rates(after)
    made = [_dumbbell(words, first.get(rate), last.get(rate)) for rate, words in RATES]
    then, now = numbers.times(first.get("speedup_mean")), numbers.times(last.get("speedup_mean"))
    speed = f"Correct kernels: {then} before, {now} after"
    parts = [*made, axis_row(AXIS)]
    chart = rows(parts, label="held-out rates before and after", kind="bare thin")
    return figure(
        "Rates",
        "share of answers",
        chart,
        element("p", element("small", f"{speed} (geometric mean over the reference).")),
    )


def _rounds(run: RunData) -> Markup:
    """The held-out problems during training (`eval_every`), by policy version."""
    found: dict[int, list[RolloutStats]] = defaultdict(list)
    for turn in run.turns:
        if turn.phase.startswith(ROUND) and turn.phase.removeprefix(ROUND).isdigit():
            found[int(turn.phase.removeprefix(ROUND))].append(turn.stats)
    if not found:
        return Markup("")
    last = max([*found, *(update.version for update in run.updates)])
    by_version = sorted((found | {0: run.phase(BEFORE), last: found.get(last) or run.phase(AFTER)}).items())
    rates = [(float(version), outcome_rates(stats)) for version, stats in by_version if stats]
    lines = [
        Line(words, [(version, found_rates[rate]) for version, found_rates in rates], colour, dots=True)
        for (rate, words), colour in zip(RATES, ("compile", "c3", "c4"), strict=True)
    ]
    chart = line_chart(lines, label="held-out rates by policy version", y_format=numbers.percent, y_ends=(0.0, 1.0))
    return figure("During training", "share of answers, by policy version", chart)


def _dumbbell(name: str, before: float | None, after: float | None) -> Markup:
    tip = f"{name}: {numbers.percent(before)} before, {numbers.percent(after)} after"
    return dumbbell(name, before, after, ("correct", "correct s2", "wrong s3"), tip)


def _problems(before: Sequence[RolloutStats], after: Sequence[RolloutStats]) -> Markup:
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for when, stats in (("before", before), ("after", after)):
        answers: dict[str, list[bool]] = defaultdict(list)
        for s in stats:
            answers[s.problem_id].append(s.correct)
        for problem, correct in answers.items():
            shares[problem][when] = sum(correct) / len(correct)
    made = [
        _dumbbell(problem, shares[problem].get("before"), shares[problem].get("after")) for problem in sorted(shares)
    ]
    left = f"; {len(made) - MOST} more are not shown" if len(made) > MOST else ""
    chart = rows([*made[:MOST], axis_row(AXIS)], label="held-out problems before and after", kind="bare thin")
    return figure("Correct by problem", f"share of answers{left}", chart)
