"""What the staleness study found: outcomes of arms → intervals over seeds, tables in Markdown, a picture. Pure.

An arm whose loss or gradient was not finite ends with reward 0: it is never left out of a mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.harness import markdown
from benchmarks.staleness.arm import ArmResult
from kbrl_async.evaluation.proportions import clustered_mean
from kbrl_async.lab.report import plots

MARKS = "<!-- staleness: figures from here -->", "<!-- staleness: to here -->"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of Student's interval; no width from a single value."""
    mean, ends = statistics.fmean(values), clustered_mean([[value] for value in values])
    return mean, (ends[1] - ends[0]) / 2 if ends else math.nan


def format_interval(values: Sequence[float]) -> str:
    """`.71 ± .04`, or nothing."""
    if not values:
        return "–"
    mean, half = interval(values)
    return _short(mean) if math.isnan(half) else f"{_short(mean)} ± {_short(half)}"


def _short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def has_diverged(outcome: ArmResult) -> bool:
    """Not finite, or worse than the policy that training began with."""
    return bool(outcome.failure) or outcome.after["reward"] < outcome.before["reward"]


def worst_late_batch(outcome: ArmResult) -> float:
    """The lowest reward of a batch in the second half: a run that goes up and down shows here."""
    return min([update["reward"] for update in outcome.history[len(outcome.history) // 2 :]], default=0.0)


def worst(outcome: ArmResult, name: str, choose: Callable[[Iterable[float]], float]) -> float:
    """The smallest or largest value that a metric had in any update; nan where it never had one."""
    return choose([update[name] for update in outcome.history if name in update] or [math.nan])


class SettingFigures:
    """ArmResults of one setting, by correction and staleness."""

    def __init__(self, outcomes: Sequence[ArmResult]) -> None:
        self.outcomes = list(outcomes)
        self.corrections = list(dict.fromkeys(o.arm.correction for o in outcomes))
        self.stalenesses = sorted({o.arm.staleness for o in outcomes})
        self.seeds = sorted({o.arm.seed for o in outcomes})

    def of(self, correction: str, staleness: int) -> list[ArmResult]:
        return [o for o in self.outcomes if (o.arm.correction, o.arm.staleness) == (correction, staleness)]

    def rewards(self, correction: str, staleness: int) -> list[float]:
        return [o.after["reward"] for o in self.of(correction, staleness)]

    def change(self, correction: str, staleness: int) -> list[float]:
        """Final reward less that of the same seed at S = 0."""
        return self._less((correction, staleness), (correction, 0))

    def paired(self, one: str, other: str, staleness: int) -> list[float]:
        """Final reward of `other` less that of `one`, seed by seed."""
        return self._less((other, staleness), (one, staleness))

    def _less(self, *both: tuple[str, int]) -> list[float]:
        more, less = ({o.arm.seed: o.after["reward"] for o in self.of(*one)} for one in both)
        return [more[seed] - less[seed] for seed in sorted(more.keys() & less.keys())]

    def ordered(self, first: Sequence[str]) -> list[str]:
        """Corrections: those of `first`, then the others by what is left at the largest staleness."""
        last = self.stalenesses[-1]
        rest = [name for name in self.corrections if name not in first]
        rest.sort(key=lambda name: -statistics.fmean(self.rewards(name, last) or [0.0]))
        return [name for name in first if name in self.corrections] + rest


def hardest(outcomes: Sequence[ArmResult]) -> str:
    """The setting in which the most corrections were tried."""
    tried: dict[str, set[str]] = {}
    for outcome in outcomes:
        tried.setdefault(outcome.arm.setting, set()).add(outcome.arm.correction)
    return max(tried, key=lambda name: len(tried[name]))


def findings(figures: SettingFigures, none: str, default: str, staleness: int = 4) -> list[str]:
    """What the figures say of staleness without and with the default correction, in words that follow from them."""
    said = []
    for name, words in ((none, "Without correction"), (default, f"With the default correction (`{default}`)")):
        found = figures.change(name, staleness)
        if not found:
            continue
        mean, half = interval(found)
        is_noise = math.isnan(half) or abs(mean) <= half
        verdict = "within" if is_noise else "outside"
        fresh = figures.rewards(name, 0)
        said.append(
            f"{words}, S={staleness} changes the final reward by {_signed(mean)} ± {_short(half)} against S=0 of the "
            f"same {len(found)} seeds ({_short(statistics.fmean(fresh))} there): {verdict} noise."
        )
    for lag in figures.stalenesses:
        pair = figures.paired(none, default, lag)
        if lag >= staleness and len(pair) > 1:
            mean, half = interval(pair)
            told = "a difference" if abs(mean) > half else "no more than noise"
            said.append(
                f"At S={lag} the default correction ends {_signed(mean)} ± {_short(half)} from no correction, {told}; "
                f"{sum(map(has_diverged, figures.of(none, lag)))} of {len(figures.of(none, lag))} uncorrected runs and "
                f"{sum(map(has_diverged, figures.of(default, lag)))} of {len(figures.of(default, lag))} corrected ones "
                "end below the policy that they began with."
            )
    return said


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{_short(abs(value))}"


def reward_table(figures: SettingFigures, names: Sequence[str]) -> str:
    """Final reward by correction and S, and the paired change from S = 0 to S = 4."""
    heads = [f"S={s}" for s in figures.stalenesses]
    paired = 4 in figures.stalenesses and 0 in figures.stalenesses
    rows = (
        [name, *(format_interval(figures.rewards(name, s)) for s in figures.stalenesses)]
        + ([_change(figures, name)] if paired else [])
        for name in names
    )
    return markdown(["correction", *heads, *(["S=4 less S=0, paired"] if paired else [])], rows)


def _change(figures: SettingFigures, name: str) -> str:
    found = figures.change(name, 4)
    return format_interval(found).replace("-0.", "−.").replace("-", "−") if found else "–"


def stability_table(figures: SettingFigures, names: Sequence[str], staleness: int) -> str:
    """What the updates said of themselves: mean over seeds of each run's worst or last value."""
    of = {name: outcomes for name in names if (outcomes := figures.of(name, staleness))}
    rows = {name: _stability(outcomes) for name, outcomes in of.items()}
    return markdown(
        ["correction", *next(iter(rows.values()), {})], ([name, *row.values()] for name, row in rows.items())
    )


def _stability(outcomes: Sequence[ArmResult]) -> dict[str, str]:
    def mean(value: Callable[[ArmResult], float]) -> float:
        return statistics.fmean(map(value, outcomes))

    lost = [
        statistics.fmean(u.get("masked_share", 0.0) + u.get("dropped_share", 0.0) for u in o.history)
        for o in outcomes
        if o.history
    ]
    return {
        "correct": format_interval([o.after["correct"] for o in outcomes]),
        "worse than at the start": f"{sum(map(has_diverged, outcomes))} of {len(outcomes)}",
        "worst late batch": _short(mean(worst_late_batch)),
        "lowest ESS": f"{mean(lambda o: worst(o, 'ess', min)):.2f}",
        "largest mismatch KL": f"{mean(lambda o: worst(o, 'mismatch_kl', max)):.2g}",
        "largest gradient norm": f"{mean(lambda o: worst(o, 'grad_norm_max', max)):.2g}",
        "largest ratio": f"{mean(lambda o: worst(o, 'ratio_max', max)):.2g}",
        "entropy, last": f"{mean(lambda o: o.history[-1]['entropy'] if o.history else math.nan):.2f}",
        "dropped or masked": f"{100 * statistics.fmean(lost or [0.0]):.1f} %",
    }


def picture(figures: SettingFigures, names: Sequence[str], title: str) -> str:
    """Final reward over S: a line per correction, its band from the worst to the best seed for the first two."""
    lines = []
    for number, name in enumerate(names[: len(plots.COLOURS)]):
        found = [(s, figures.rewards(name, s)) for s in figures.stalenesses]
        points = [(float(s), statistics.fmean(values)) for s, values in found if values]
        band = [(float(s), min(values), max(values)) for s, values in found if values] if number < 2 else []
        lines.append(plots.Series(name, points, dots=True, band=band))
    words = {"title": title, "x": "staleness S, versions", "y": "final reward"}
    return str(
        plots.line_chart(
            lines, label=title, box=plots.STANDALONE, standalone=words, labels="names", x_ticks=figures.stalenesses
        )
    )
