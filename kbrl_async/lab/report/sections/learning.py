"""Whether the policy got better: reward, rates, speedups and the learner's own figures over the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.model import RunData, Turn
from kbrl_async.lab.report.plots import Line, line_chart, time_label, time_ticks
from kbrl_async.lab.report.sections.columns import Column, columns
from kbrl_async.lab.report.sections.layout import figure, grid, section
from kbrl_async.runs.telemetry.training_metrics import geometric_mean, outcome_rates, speedups

POLICY = (
    ("entropy", "Entropy", "of the policy, nats a token"),
    ("loss", "Loss", "of the update"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("mismatch_kl", "Divergence", "from the policy that wrote the samples"),
    ("ess", "Effective sample size", "share of the batch that counts"),
)


def make(run: RunData) -> Markup:
    found = columns(run)
    charts = [_reward(run, found), _rates(run, found), _speed(run, found), _levels(run, found)]
    charts += [_policy(run, *what) for what in POLICY]
    intro = (
        f"A point is the mean of about {_size(found)} training rollouts, those of one update or of a few in a row, at "
        "the time of the update."
    )
    return section("learning", "What the policy learned", intro, grid(charts))


def _line(
    name: str,
    found: Sequence[Column],
    value: Callable[[list[Turn]], float | None],
    colour: str,
) -> Line:
    points = [(column.at, mean) for column in found if (mean := value(column.turns)) is not None]
    return Line(name, points, colour)


def _rate(name: str) -> Callable[[list[Turn]], float | None]:
    return lambda turns: outcome_rates([turn.stats for turn in turns]).get(name)


def _reward(run: RunData, found: Sequence[Column]) -> Markup:
    if not found:
        return Markup("")
    line = _line("mean", found, _rate("reward_mean"), "c1")
    band = [(c.at, *_quartiles([turn.stats.reward for turn in c.turns])) for c in found]
    chart = _over_time(run, [Line("mean", line.points, "c1", band=band)], "reward over time", numbers.plain)
    return figure("Reward", "mean; the band holds the middle half", chart)


def _quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4 if len(ordered) > 1 else 0]


def _rates(run: RunData, found: Sequence[Column]) -> Markup:
    if not found:
        return Markup("")
    wanted = (("compiles", "compile_rate", "compile"), ("correct", "correct_rate", "c3"), ("faster", "fast_1", "c4"))
    lines = [_line(name, found, _rate(rate), colour) for name, rate, colour in wanted]
    chart = _over_time(run, lines, "rates over time", numbers.percent, (0.0, 1.0))
    return figure("Rates", "share of the rollouts; faster than the reference", chart)


def _speed(run: RunData, found: Sequence[Column]) -> Markup:
    def typical(turns: list[Turn]) -> float | None:
        return geometric_mean(speedups(turn.stats for turn in turns))

    line = _line("mean", found, typical, "c2")
    if not line.points:
        return Markup("")
    chart = _over_time(run, [line], "speedup of correct kernels over time", numbers.times, (0.0, 1.0))
    return figure("Speedup", "geometric mean of correct kernels over the reference", chart)


def _levels(run: RunData, found: Sequence[Column]) -> Markup:
    levels = sorted({turn.stats.level for column in found for turn in column.turns})
    if len(levels) < 2:
        return Markup("")
    # a level has its share of each column only: fewer columns keep its points as steady
    wide = columns(run, max(6, len(found) // len(levels)))
    lines = [
        _line(f"L{level}", wide, _correct_of(level), f"c{number % 8 + 1}") for number, level in enumerate(levels[:6])
    ]
    chart = _over_time(run, lines, "correct by level over time", numbers.percent, (0.0, 1.0))
    return figure("Correct by level", "share of rollouts", chart)


def _size(found: Sequence[Column]) -> str:
    return numbers.plain(float(round(sum(len(column.turns) for column in found) / max(1, len(found)))))


def _correct_of(level: int) -> Callable[[list[Turn]], float | None]:
    rate = _rate("correct_rate")
    return lambda turns: rate([turn for turn in turns if turn.stats.level == level])


def _over_time(
    run: RunData,
    lines: Sequence[Line],
    label: str,
    y_format: Callable[[float], str],
    y_ends: tuple[float, ...] = (0.0,),
) -> Markup:
    start = min((line.points[0][0] for line in lines if line.points), default=0.0)
    ticks = time_ticks(run.duration, 5, start)
    return line_chart(
        lines, label=label, x_format=time_label, y_format=y_format, y_ends=y_ends, x_ticks=ticks
    )  # fmt: skip


def _policy(run: RunData, name: str, title: str, note: str) -> Markup:
    points = run.curves.get(name) or []
    if not points:
        return Markup("")
    line = Line("", points, "c8", window=max(3, len(points) // 30) if len(points) > 6 else 1)
    return figure(title, note, line_chart([line], label=f"{title} by update", y_ends=()))
