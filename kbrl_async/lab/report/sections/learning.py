"""Whether the policy got better: reward, rates, speedups by policy version, and the learner's own figures by update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kbrl_async.evaluation.proportions import WORDS
from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import VersionAxis, figure, grid, section, version_axis
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.plots import Series, line_chart
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry.by_version import VersionRange, points, sentence, settled
from kbrl_async.runs.telemetry.training_metrics import outcome_rates

MOST = 48
LEAST_A_POINT = 32

POLICY = (
    ("entropy", "Entropy", "of the policy, nats a token"),
    ("loss", "Loss", "of the update"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("mismatch_kl", "Divergence", "from the policy that wrote the samples"),
    ("ess", "Effective sample size", "share of the batch that counts"),
)


def make(run: RunData) -> Markup:
    found = settled(run.answers)
    parts = points(found, MOST, LEAST_A_POINT)
    axis = version_axis(run)
    charts = [_reward(parts, axis), _rates(parts, axis), _speed(parts, axis), _levels(run, axis)]
    charts += [_policy(run, axis, *what) for what in POLICY]
    intro = (
        "Every chart runs over policy versions: training answers stand at the version that wrote them, whenever they "
        f"were scored, about {_size(parts)} a point; what the learner reports stands at the version that the update "
        f"made. {sentence(run.answers, found)}"
    )
    return section("learning", "What the policy learned", intro, grid(charts))


def _line(name: str, parts: Sequence[VersionRange], figure_name: str, colour: str, *, band: bool = False) -> Series:
    found = [(part.middle, part.figures().get(figure_name)) for part in parts]
    there = [(x, each) for x, each in found if each is not None]
    ends = [(x, *each.interval) for x, each in there if each.interval] if band else []
    return Series(name, [(x, each.value) for x, each in there], colour, band=ends)


def _reward(parts: Sequence[VersionRange], axis: VersionAxis) -> Markup:
    if not parts:
        return Markup("")
    line = _line("mean", parts, "reward_mean", "c1", band=True)
    return figure("Reward", f"mean, with its {WORDS} interval", _chart([line], axis, "reward", numbers.plain))


def _rates(parts: Sequence[VersionRange], axis: VersionAxis) -> Markup:
    if not parts:
        return Markup("")
    wanted = (
        ("compiles", "compile_rate", "compile"),
        ("correct", "correct_rate", "c3"),
        ("proven", "fast_1_proven", "c4"),
    )
    lines = [_line(name, parts, rate, colour, band=name == "correct") for name, rate, colour in wanted]
    chart = _chart(lines, axis, "rates", numbers.percent, (0.0, 1.0))
    return figure("Rates", f"share of the answers; proven: fast_1_proven; the band: {WORDS} interval of correct", chart)


def _speed(parts: Sequence[VersionRange], axis: VersionAxis) -> Markup:
    line = _line("mean", parts, "speedup_mean", "c2")
    if not line.points:
        return Markup("")
    chart = _chart([line], axis, "speedup of correct kernels", numbers.times, (0.0, 1.0))
    return figure("Speedup", "geometric mean of correct kernels over the reference", chart)


def _levels(run: RunData, axis: VersionAxis) -> Markup:
    found = settled(run.answers)
    levels = sorted({answer.stats.level for answers in found.versions.values() for answer in answers})
    if len(levels) < 2:
        return Markup("")
    # a level has its share of each point only: fewer points keep it as steady
    parts = points(found, max(6, MOST // len(levels)), LEAST_A_POINT * len(levels))
    lines = [Series(f"L{level}", _of_level(parts, level), f"c{n % 8 + 1}") for n, level in enumerate(levels[:6])]
    chart = _chart(lines, axis, "correct by level", numbers.percent, (0.0, 1.0))
    return figure("Correct by level", "share of answers", chart)


def _of_level(parts: Sequence[VersionRange], level: int) -> list[tuple[float, float]]:
    members: list[tuple[float, list[RolloutStats]]] = [
        (part.middle, [s for s in part.stats if s.level == level]) for part in parts
    ]
    return [(x, outcome_rates(stats)["correct_rate"]) for x, stats in members if stats]


def _size(parts: Sequence[VersionRange]) -> str:
    return numbers.plain(float(round(sum(len(part.answers) for part in parts) / max(1, len(parts)))))


def _chart(
    lines: Sequence[Series],
    axis: VersionAxis,
    label: str,
    y_format: Callable[[float], str],
    y_ends: tuple[float, ...] = (0.0,),
) -> Markup:
    words = f"{label} by policy version"
    return line_chart(lines, label=words, y_format=y_format, y_ends=y_ends, x_ends=axis.ends, x_ticks=axis.ticks())


def _policy(run: RunData, axis: VersionAxis, name: str, title: str, note: str) -> Markup:
    points = run.curves.get(name) or []
    if not points:
        return Markup("")
    line = Series("", points, "c8", window=max(3, len(points) // 30) if len(points) > 6 else 1)
    return figure(title, note, _chart([line], axis, title, numbers.plain, ()))
