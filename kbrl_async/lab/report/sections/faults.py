"""Where candidates end: the funnel, faults by policy version, and what was caught cheating."""

from __future__ import annotations

from collections import Counter

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import Bar, data_table, figure, grid, row, rows, section, version_axis
from kbrl_async.lab.report.markup import Content, Markup, element
from kbrl_async.lab.report.model import Mistake, RunData
from kbrl_async.lab.report.plots import stacked
from kbrl_async.lab.report.sections.rollouts import link
from kbrl_async.lab.report.verdict import FAULT_NAMES
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.archive.funnel import funnel
from kbrl_async.runs.telemetry.by_version import points, settled
from protocols.records import Fault

COLUMNS, LEAST_A_COLUMN = 36, 32
MOST_FAULTS = 6
OUTCOMES = (
    ("faster", "fast"), ("correct", "correct"), ("incorrect", "slow"), ("crashed", "c5"), ("no compile", "wrong"),
    ("static check", "broken"), ("no code", "none"), ("cheating", "cheat"),
    ("unproven", "c8"),
)  # fmt: skip
FAULTS = {
    "incorrect": 2, "runtime_error": 3, "timeout": 3, "out_of_memory": 3, "illegal_access": 3, "compile_error": 4,
    "static_violation": 5, "format_error": 6, "cheating": 7, "unproven": 8,
}  # fmt: skip
STEPS = {
    "format": "has code",
    "static": "static check",
    "compile": "compiles",
    "small_inputs": "small inputs",
    "full_inputs": "full inputs",
    "timing": "timed",
}


def make(run: RunData) -> Markup:
    if not run.training:
        return Markup("")
    intro = (
        "Every candidate passes the same steps and leaves at the first that it fails. What is ours to answer for, such "
        "as a lost worker, is never scored."
    )
    charts = grid([_funnel(run), _by_version(run), _counts(run)])
    return section("faults", "Faults and cheating", intro, charts, _mistakes(run), _rules(run))


def _funnel(run: RunData) -> Markup:
    steps = funnel(turn.stats for turn in run.training) or run.summary.get("funnel") or {}
    if not steps:
        return Markup("")
    whole = max(step["entered"] for step in steps.values()) or 1
    made = []
    for name, step in steps.items():
        entered, passed = step["entered"], step["passed"]
        bars = [
            Bar(0, 100 * passed / whole, "correct s5"),
            Bar(100 * passed / whole, 100 * entered / whole, "wrong s3"),
        ]
        tip = f"{passed:,.0f} of {entered:,.0f} passed; {numbers.seconds(step['seconds'])} in all"
        made.append(
            row(STEPS.get(name, name), bars, value=f"−{entered - passed:,.0f}" if entered > passed else "0", tip=tip)
        )
    return figure(
        "Funnel",
        "passed (green) and failed at each step, of all training answers that were scored",
        rows(made, label="funnel", kind="bars"),
    )


def outcome(stats: RolloutStats) -> int:
    """Index into `OUTCOMES`. Code that is no Python, or no `ModelNew`, fails the static check, as in the funnel."""
    if stats.fault in FAULTS:
        return FAULTS["static_violation" if stats.fault == "format_error" and stats.format else stats.fault]
    return 0 if stats.fast_1_proven else 1 if stats.correct else 2


def _by_version(run: RunData) -> Markup:
    found = points(settled(run.answers), COLUMNS, LEAST_A_COLUMN)
    if len(found) < 2:
        return Markup("")
    counts = [(part.middle, Counter(map(outcome, part.stats))) for part in found]
    shares = [(at, [float(count[k]) for k in range(len(OUTCOMES))]) for at, count in counts]
    chart = stacked(
        OUTCOMES,
        shares,
        label="outcomes by policy version",
        x_format=numbers.plain,
        x_ends=version_axis(run).ends,
        x_ticks=version_axis(run).ticks(),
    )
    return figure("Outcomes by policy version", "share of the answers that a version wrote", chart)


def _counts(run: RunData) -> Markup:
    found = Counter(outcome(turn.stats) for turn in run.training)
    most = max(found.values())
    made = [
        row(
            name,
            [Bar(0, 100 * found[i] / most, f"{class_} s5")] if found[i] else [],
            value=f"{found[i]:,}",
            tip=numbers.percent(found[i] / len(run.training)),
        )
        for i, (name, class_) in enumerate(OUTCOMES)
    ]
    return figure(
        "Outcomes",
        f"of all {numbers.count(len(run.training), 'training answer')} that were scored, in whatever groups",
        rows(made, label="outcomes", kind="bars"),
    )


def _mistakes(run: RunData) -> Markup:
    """The commonest kinds of each of the commonest faults, with an example to go to."""
    found = [_of_fault(run, fault) for fault in list(run.examples.mistakes)[:MOST_FAULTS]]
    return grid(found, "grid two")


def _of_fault(run: RunData, fault: str) -> Markup:
    known, every = run.examples.read[fault]
    kinds = run.examples.mistakes[fault]
    if not kinds:
        return Markup("")
    part = f" of which {known:,} were read" if known < every else ""
    note = f"{numbers.count(every, 'training answer')}{part}, messages that are alike together"
    title = f"{FAULT_NAMES[Fault(fault)].capitalize()}, the commonest"
    return figure(title, note, *(_mistake(run, kind, known) for kind in kinds))


def _mistake(run: RunData, one: Mistake, known: int) -> Markup:
    share = f"{one.count:,} · {numbers.percent(one.count / known)}"
    head = element("summary", element("span", one.kind), element("small", share))
    where = element(
        "p", f"on {numbers.count(one.problems, 'problem')}; for example ", link(run, one.task_id), class_="facts"
    )
    hint = element("p", one.hint, class_="said") if one.hint and one.hint != one.kind else ""
    return element("details", head, where, element("pre", one.example), hint, class_="mistake")


def _rules(run: RunData) -> Content:
    """What fired, where the archive knows."""
    if not run.rules:
        return ""
    lines = [
        element("tr", element("td", rule, class_="w"), element("td", f"{count:,}", class_="n"))
        for rule, count in run.rules.items()
    ]
    head = element("tr", element("th", "check that fired"), element("th", "turns", class_="n"))
    return figure("Checks", "the commonest, evaluation included", data_table(lines, head))
