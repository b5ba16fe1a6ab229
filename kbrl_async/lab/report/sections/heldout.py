"""Problems that were never trained on: before, during and after training, with intervals, and what more tries find."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from kbrl_async.evaluation.metrics import Figure, Sample, by_problem, mean_over_problems, pass_at_k, sample_of, values_k
from kbrl_async.evaluation.proportions import WORDS, wilson
from kbrl_async.lab.report import differences, numbers
from kbrl_async.lab.report.differences import Delta
from kbrl_async.lab.report.layout import (
    ShareInterval,
    axis_row,
    data_table,
    figure,
    grid,
    legend,
    rows,
    section,
    two_shares,
    version_axis,
)
from kbrl_async.lab.report.markup import Content, Markup, element
from kbrl_async.lab.report.model import AFTER, BEFORE, ROUND, RunData
from kbrl_async.lab.report.plots import Series, line_chart
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.summary import KINDS
from kbrl_async.runs.telemetry.by_version import SHARES
from kbrl_async.runs.telemetry.training_metrics import outcome_rates

RATES = {"compile_rate": "compiles", "correct_rate": "correct", "fast_1": "fast_1", "fast_1_proven": "proven faster"}
COLOURS = {"compile_rate": "compile", "correct_rate": "c3", "fast_1_proven": "c4"}
"""Of the lines during training."""
AXIS = ((0.0, "0"), (50.0, "50"), (100.0, "100 %"))
MOST = 40
Answers = Sequence[RolloutStats]


def make(run: RunData) -> Markup:
    before, after = run.phase(BEFORE), run.phase(AFTER)
    if not before and not after:
        return Markup("")
    problems = numbers.count(len({s.problem_id for s in before or after}), "problem")
    first, last = numbers.count(len(before), "time"), numbers.count(len(after), "time")
    intro = (
        f"The same {problems}, which training never sees, answered {first} by the first policy and {last} by the last. "
        f"Dots are shares of the answers, bars their {WORDS} intervals for these problems (Wilson's). A difference has "
        "an interval of its own, which allows for how differently problems change (Student's, paired)."
    )
    key = legend([("none", "before (above)"), ("correct", "after (below)")])
    charts = grid([_rates(before, after, run.summary.get("heldout_kinds") or {}), _problems(before, after)], "grid two")
    curves = grid([_rounds(run), _pass_at_k(before, after)])
    return section("heldout", "Held-out problems", intro, key, charts, curves)


def share(answers: Answers, flag: str) -> ShareInterval | None:
    """Of answers that are so, with Wilson's interval; None of none."""
    hits = sum(bool(getattr(s, flag)) for s in answers)
    return ShareInterval(hits / len(answers), *wilson(hits, len(answers))) if answers else None


# ── before and after ─────────────────────────────────────────────────────────────────────────────────────────────────


def _rates(before: Answers, after: Answers, kinds: Mapping[str, str]) -> Markup:
    made = [
        two_times(words, *(share(found, SHARES[rate]) for found in (before, after))) for rate, words in RATES.items()
    ]
    for kind, words in KINDS.items() if len(set(kinds.values())) > 1 else ():
        parts = ([s for s in found if kinds.get(s.problem_id) == kind] for found in (before, after))
        made.append(two_times(f"correct, {words}", *(share(part, "correct") for part in parts)))
    chart = rows([*made, axis_row(AXIS)], label="held-out rates before and after", kind="bare")
    then, now = (numbers.times(outcome_rates(found).get("speedup_mean")) for found in (before, after))
    speed = element("p", element("small", f"Correct kernels: {then} before, {now} after (geometric mean)."))
    return figure("Rates", "share of answers", chart, _changes(before, after), speed)


def two_times(name: str, before: ShareInterval | None, after: ShareInterval | None) -> Markup:
    """A row with a share at two times."""
    said = [f"{_with_interval(one)} {when}" for one, when in ((before, "before"), (after, "after"))]
    return two_shares(name, before, after, "correct", f"{name}: {', '.join(said)}")


def _with_interval(one: ShareInterval | None) -> str:
    return (
        "–"
        if one is None
        else f"{numbers.percent(one.value)} ({numbers.percent(one.low)} … {numbers.percent(one.high)})"
    )


def _changes(before: Answers, after: Answers) -> Markup:
    """The differences, as a table."""
    if not before or not after:
        return Markup("")
    lines = []
    for rate, words in RATES.items():
        found, _ = differences.paired(*(_by_problem(answers, SHARES[rate]) for answers in (before, after)))
        lines.append(element("tr", element("td", words), element("td", _format_difference(found), class_="n")))
    words = f"{WORDS} interval; bold: not chance"
    head = element("tr", element("th", "after minus before"), element("th", words, class_="n"))
    return data_table(lines, head)


def _format_difference(found: Delta | None) -> Content:
    if found is None:
        return "–"
    return element("b" if found.is_told else "span", numbers.points(found))


def _by_problem(answers: Answers, flag: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for stats in answers:
        found[stats.problem_id].append(float(getattr(stats, flag)))
    return found


def _problems(before: Answers, after: Answers) -> Markup:
    names = sorted({s.problem_id for s in (*before, *after)})
    found = [[[s for s in answers if s.problem_id == name] for answers in (before, after)] for name in names[:MOST]]
    made = [two_times(name, *(share(part, "correct") for part in two)) for name, two in zip(names, found, strict=False)]
    left = f"; {len(names) - MOST} more are not shown" if len(names) > MOST else ""
    chart = rows([*made, axis_row(AXIS)], label="held-out problems before and after", kind="bare")
    return figure("Correct by problem", f"share of answers{left}", chart)


# ── during training ──────────────────────────────────────────────────────────────────────────────────────────────────


def _rounds(run: RunData) -> Markup:
    """The held-out problems during training (`eval_every`), by policy version."""
    found: dict[int, list[RolloutStats]] = defaultdict(list)
    for turn in run.turns:
        if turn.phase.startswith(ROUND) and turn.phase.removeprefix(ROUND).isdigit():
            found[int(turn.phase.removeprefix(ROUND))].append(turn.stats)
    if not found:
        return Markup("")
    axis = version_axis(run)
    by_version = {0: run.phase(BEFORE), **found}
    by_version[axis.last] = found.get(axis.last) or run.phase(AFTER)
    lines = [_line(RATES[rate], by_version, SHARES[rate], colour) for rate, colour in COLOURS.items()]
    chart = line_chart(
        lines, label="held-out rates by policy version", y_format=numbers.percent, y_ends=(0.0, 1.0),
        x_ends=axis.ends, x_ticks=axis.ticks(),
    )  # fmt: skip
    return figure("During training", f"share of answers, by policy version, with {WORDS} intervals", chart)


def _line(name: str, by_version: Mapping[int, Answers], flag: str, colour: str) -> Series:
    found = [(float(v), one) for v in sorted(by_version) if (one := share(by_version[v], flag)) is not None]
    whiskers = [(x, one.low, one.high) for x, one in found]
    return Series(name, [(x, one.value) for x, one in found], colour, dots=True, whiskers=whiskers)


# ── several tries ────────────────────────────────────────────────────────────────────────────────────────────────────


def _pass_at_k(before: Answers, after: Answers) -> Markup:
    """By how many answers a problem is solved, before and after."""
    times = (("before", "none", before), ("after", "correct", after))
    return pass_at_k_chart([(name, colour, pass_at(answers)) for name, colour, answers in times])


def pass_at(answers: Answers) -> dict[int, Figure]:
    """By k: the chance that one of k answers to a problem is correct, with its interval over problems."""
    samples = [sample_of(stats) for stats in answers]
    clusters = by_problem(samples)
    return {
        k: mean_over_problems([c for c in clusters if len(c) >= k], _chance(k)) for k in values_k(samples)
    }  # fmt: skip


def _chance(k: int) -> Callable[[Sequence[Sample]], float]:
    return lambda cluster: pass_at_k(len(cluster), sum(sample.correct for sample in cluster), k)


def pass_at_k_chart(series: Sequence[tuple[str, str, Mapping[int, Figure]]]) -> Markup:
    """(name, colour, chance by k) of each series; nothing where nobody was asked twice. Of many, the first one alone
    has intervals: they would hide each other."""
    lines = [
        Series(
            name, [(float(k), one.value) for k, one in found.items()], colour, dots=True,
            whiskers=[(float(k), one.lo, one.hi) for k, one in found.items() if number == 0 or len(series) == 2],
        )
        for number, (name, colour, found) in enumerate(series)
        if len(found) > 1
    ]  # fmt: skip
    if not lines:
        return Markup("")
    ticks = sorted({x for line in lines for x, _ in line.points})
    chart = line_chart(
        lines,
        label="pass@k",
        y_format=numbers.percent,
        y_ends=(0.0, 1.0),
        log="x",
        x_ticks=ticks,
        labels="names",
    )
    return figure("pass@k", f"problems of which one of k answers is correct, with {WORDS} bootstrap intervals", chart)
