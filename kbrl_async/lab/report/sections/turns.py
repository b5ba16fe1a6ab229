"""What refinement turns bring, where rollouts take several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kbrl_async.evaluation.proportions import clustered_share
from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import ShareInterval, axis_row, figure, grid, legend, rows, section
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.plots import Series, line_chart
from kbrl_async.lab.report.sections.heldout import AXIS, two_times
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry import training_metrics
from kbrl_async.runs.telemetry.by_version import Ends, VersionRange, ends, sentence, settled

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
    key = legend([("none", "first versions (above)"), ("correct", "last versions (below)")])
    correct = _by_turn(two, "correct", "Correct by turn")
    compiles = _by_turn(two, "compiled", "Compiles by turn")
    return section("turns", "Refinement turns", intro, key, grid([correct, compiles, _success(two)]))


def _by_turn(two: Ends, flag: str, title: str) -> Markup:
    parts = (two.first, two.last)
    numbered = sorted({answer.stats.turn for part in parts if part for answer in part.answers})[:MOST_TURNS]
    made = [two_times(f"turn {n + 1}", *(_share(part, n, flag) for part in parts)) for n in numbered]
    return figure(title, "share of the turns", rows([*made, axis_row(AXIS)], label=title, kind="bare"))


def _share(part: VersionRange | None, turn: int, flag: str) -> ShareInterval | None:
    """Of the turns of this number that are so; answers of one group are alike."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for answer in part.answers if part else ():
        if answer.stats.turn == turn:
            groups[answer.group_id].append(bool(getattr(answer.stats, flag)))
    hits = list(groups.values())
    return ShareInterval(sum(map(sum, hits)) / sum(map(len, hits)), *clustered_share(hits)) if hits else None


def _success(two: Ends) -> Markup:
    """How many rollouts have a correct kernel by their n-th turn, of the first and of the last versions."""
    first, last = (part.stats if part else [] for part in (two.first, two.last))
    lines = [
        Series(name, _solved(part), colour, dots=True)
        for name, colour, part in (("first", "c8", first), ("last", "c3", last))
        if part
    ]
    ticks = [x for line in lines for x, _ in line.points]
    chart = line_chart(
        lines, label="solved by turn", y_format=numbers.percent, y_ends=(0.0, 1.0), labels="names",
        x_ticks=sorted(set(ticks)),
    )  # fmt: skip
    return figure("Solved within n turns", "share of rollouts, of first and last versions, correct by then", chart)


def _solved(stats: Sequence[RolloutStats]) -> list[tuple[float, float]]:
    rollouts = training_metrics.trajectories(stats)
    longest = max((len(rollout) for rollout in rollouts), default=0)
    return [
        (float(n), sum(any(turn.correct for turn in rollout[:n]) for rollout in rollouts) / len(rollouts))
        for n in range(1, longest + 1)
    ]
