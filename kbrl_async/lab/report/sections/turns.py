"""What refinement turns bring, where rollouts take several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import axis_row, dumbbell, figure, grid, legend, rows, section
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.plots import Line, line_chart
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry import training_metrics
from kbrl_async.runs.telemetry.by_version import Ends, ends, sentence, settled
from kbrl_async.runs.telemetry.training_metrics import outcome_rates

MOST_TURNS = 16


def make(run: RunData) -> Markup:
    stats = [turn.stats for turn in run.training]
    if not any(s.turn for s in stats):
        return Markup("")
    found = settled(run.answers)
    written = [answer.stats for answers in found.versions.values() for answer in answers]
    two = ends(found)
    rollouts = len({s.rollout_id for s in written})
    repaired = training_metrics.compile_fix_rate(written)
    said = (
        ""
        if repaired is None
        else f" {numbers.percent(repaired)} of first compile errors are repaired in the next turn."
    )
    intro = (
        f"{numbers.count(rollouts, 'rollout')} of {len(written) / max(1, rollouts):.1f} turns on average: after each "
        f"turn the policy is told what happened and tries again.{said} {sentence(run.answers, found)}"
    )
    key = legend([("none", "first versions"), ("c3", "last versions")])
    correct = _by_turn(two, "correct_rate", "Correct by turn")
    compiles = _by_turn(two, "compile_rate", "Compiles by turn")
    return section("turns", "Refinement turns", intro, key, grid([correct, compiles, _success(two)]))


def _both(two: Ends) -> list[list[RolloutStats]]:
    return [part.stats if part else [] for part in (two.first, two.last)]


def _by_turn(two: Ends, rate: str, title: str) -> Markup:
    first, last = map(_by_number, _both(two))
    made = [
        _dumbbell(number, outcome_rates(first.get(number, [])).get(rate), outcome_rates(last.get(number, [])).get(rate))
        for number in sorted(set(first) | set(last))[:MOST_TURNS]
    ]
    axis = ((0.0, "0"), (50.0, "50"), (100.0, "100 %"))
    return figure(title, "share of the turns", rows([*made, axis_row(axis)], label=title, kind="bare thin"))


def _dumbbell(number: int, before: float | None, after: float | None) -> Markup:
    tip = f"turn {number + 1}: {numbers.percent(before)} of the first versions, {numbers.percent(after)} of the last"
    return dumbbell(f"turn {number + 1}", before, after, ("c3", "c3 s2", "c3 s2"), tip)


def _by_number(stats: Sequence[RolloutStats]) -> dict[int, list[RolloutStats]]:
    found: dict[int, list[RolloutStats]] = defaultdict(list)
    for s in stats:
        found[s.turn].append(s)
    return found


def _success(two: Ends) -> Markup:
    """How many rollouts have a correct kernel by their n-th turn, of the first and of the last versions."""
    first, last = _both(two)
    lines = [
        Line(name, _solved(part), colour, dots=True)
        for name, colour, part in (("first versions", "c8", first), ("last versions", "c3", last))
        if part
    ]
    chart = line_chart(lines, label="solved by turn", y_format=numbers.percent, y_ends=(0.0, 1.0), labels="names")
    return figure("Solved within n turns", "share of rollouts with a correct kernel by then", chart)


def _solved(stats: Sequence[RolloutStats]) -> list[tuple[float, float]]:
    rollouts = training_metrics.trajectories(stats)
    longest = max((len(rollout) for rollout in rollouts), default=0)
    return [
        (float(n), sum(any(turn.correct for turn in rollout[:n]) for rollout in rollouts) / len(rollouts))
        for n in range(1, longest + 1)
    ]
