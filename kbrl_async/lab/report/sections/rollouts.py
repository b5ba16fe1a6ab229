"""Answers to look at: what the policy was asked, what it wrote, which checks that passed, and what it earned."""

from __future__ import annotations

from collections.abc import Iterable

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import data_table, section
from kbrl_async.lab.report.markup import Content, Markup, element, join
from kbrl_async.lab.report.model import TRAIN, ReportedTurn, RunData, SampledTurn

CORRECT = "correct"


def make(run: RunData) -> Markup:
    sample = run.examples.sample
    if not sample:
        return Markup("")
    rest = run.examples.kept - len(sample)
    rule = (
        f"{numbers.count(len(sample), 'turn')} of {run.examples.kept:,}: this page's examples and best kernels, then "
        "from each policy version and outcome alike, drawn by their ids. kbrl inspect ID shows any other."
        if rest > 0
        else "Every turn of the run."
    )
    listed = [_turn(number, one) for number, one in enumerate(sample)]
    return section("rollouts", "Rollouts", rule, _filters(sample), element("div", *listed, class_="list"))


def link(run: RunData, task_id: str, words: str = "") -> Markup:
    """To a turn, where it is in the sample; else its id alone."""
    place = run.examples.place(task_id) if task_id else None
    shown = words or task_id
    return element("span", shown) if place is None else element("a", shown, href=f"#r{place}")


def outcome(turn: ReportedTurn) -> str:
    """In words."""
    return CORRECT if turn.stats.correct else turn.stats.fault.replace("_", " ") or "incorrect"


def version(turn: ReportedTurn) -> str:
    return f"v{turn.stats.policy_version}"


def _filters(sample: Iterable[SampledTurn]) -> Markup:
    """Shown by the script that they need."""
    turns = [one.turn for one in sample]
    versions = sorted({turn.stats.policy_version for turn in turns})
    choices = {
        "problem": sorted({turn.stats.problem_id for turn in turns}),
        "version": [f"v{number}" for number in versions],
        "outcome": sorted({outcome(turn) for turn in turns}),
    }
    boxes = [
        element("label", name, " ", element("select", _option("", "all"), *map(_option, listed), data_by=name))
        for name, listed in choices.items()
    ]
    return element("p", *boxes, element("output", ""), class_="filters", hidden=True)


def _option(value: str, words: str = "") -> Markup:
    return element("option", words or value, value=value)


def _turn(number: int, one: SampledTurn) -> Markup:
    turn, stats = one.turn, one.turn.stats
    said = outcome(turn)
    speed = f"{numbers.times(stats.speedup)}, " if stats.speedup is not None and stats.correct else ""
    heading = element(
        "summary",
        element("b", stats.problem_id),
        element("span", said, class_=f"chip {'correct' if said == CORRECT else 'wrong'}"),
        element("small", f"{turn.task_id} · {version(turn)} · {speed}reward {numbers.plain(stats.reward)}"),
    )
    prompt = element("div", element("h4", "prompt"), element("pre", one.prompt))
    answer = element(
        "div", element("h4", f"answer, {numbers.count(stats.tokens, 'token')}"), element("pre", one.answer)
    )
    body = element("div", prompt, answer, class_="pair")
    return element(
        "details", heading, _facts(turn), _checks(one), body,
        id=f"r{number}", data_problem=stats.problem_id, data_version=version(turn), data_outcome=said,
    )  # fmt: skip


def _facts(turn: ReportedTurn) -> Markup:
    stats = turn.stats
    said = ["training" if turn.phase == TRAIN else f"held-out, {turn.phase.removeprefix('eval-')} training"]
    said += [f"turn {stats.turn + 1}"] if stats.turn else []
    said += [f"reward {numbers.plain(stats.reward)}"]
    said += [f"advantage {stats.advantage:+.3g}"] if stats.advantage is not None else []
    said += [f"{numbers.count(stats.staleness, 'version')} old when trained on"] if stats.staleness is not None else []
    if stats.speedup is not None and stats.speedup_lo is not None and stats.speedup_hi is not None:
        ends = f"{numbers.times(stats.speedup_lo)} … {numbers.times(stats.speedup_hi)}"
        said.append(f"speedup {numbers.times(stats.speedup)} ({ends})")
    return element("p", " · ".join(said), class_="facts")


def _checks(one: SampledTurn) -> Content:
    lines = [
        element("tr", element("td", name.replace("_", " ")), element("td", _mark(fault)),
                element("td", numbers.seconds(seconds), class_="n"), element("td", detail, class_="w"))
        for name, fault, seconds, detail in one.checks
    ]  # fmt: skip
    words = join(element("p", text, class_="said") for text in (one.message, one.hint) if text)
    return (data_table(lines, class_="scroll checks") if lines else Markup("")) + words


def _mark(fault: str) -> str:
    return "✓" if fault == "ok" else f"✗ {fault.replace('_', ' ')}"
