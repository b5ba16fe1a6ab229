"""What `kbrl eval` found: its figures with their intervals, what more tries find, how much faster, by problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kbrl_async.evaluation.document import Document, ProblemRow
from kbrl_async.evaluation.metrics import Figure
from kbrl_async.evaluation.proportions import WORDS
from kbrl_async.evaluation.show import figure_rows
from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import data_table, figure, grid, section
from kbrl_async.lab.report.markup import Markup, element
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.plots import COLOURS, Series, line_chart
from kbrl_async.lab.report.sections.heldout import pass_at_k_chart
from kbrl_async.lab.report.verdict import FAULT_NAMES
from protocols.records import Fault

MOST = 300


def make(run: RunData) -> Markup:
    document = run.evaluation
    if document is None or document.overall.raw is None:
        return Markup("")
    intro = (
        f"{document.policy.get('label', 'A policy')}. Each problem counts alike; intervals are {WORDS} bootstrap "
        "intervals over problems."
    )
    charts = grid([_pass_at_k(document), _fast_p(document)])
    return section("evaluation", "Evaluation", intro, charts, _figures(document), _problems(document.problems))


def _pass_at_k(document: Document) -> Markup:
    parts = {"all": document.overall, **{f"L{level}": part for level, part in document.levels.items()}}
    listed = list(parts.items())[: len(COLOURS)] if len(document.levels) > 1 else [("all", document.overall)]
    return pass_at_k_chart(
        [
            (name, colour, {int(k): one for k, one in part.raw.pass_at_k.items()})
            for (name, part), colour in zip(listed, COLOURS, strict=False)
            if part.raw is not None
        ]
    )


def _fast_p(document: Document) -> Markup:
    """Share that is correct and more than p times as fast, by p."""
    assert document.overall.raw is not None
    lines = [
        _fast_line(baseline, speeds.fast_p, colour)
        for (baseline, speeds), colour in zip(document.overall.raw.speedup.items(), COLOURS, strict=False)
    ]
    ticks = [x for x, _ in lines[0].points]
    chart = line_chart(
        lines, label="fast_p", x_format=lambda p: f"{p:g}×", y_format=numbers.percent, y_ends=(0.0, 1.0), x_ticks=ticks,
        labels="names",
    )  # fmt: skip
    return figure("fast_p", f"answers that are correct and more than p times as fast, with {WORDS} intervals", chart)


def _fast_line(baseline: str, fast_p: Mapping[str, Figure], colour: str) -> Series:
    found = sorted((float(p), one) for p, one in fast_p.items())
    whiskers = [(p, one.lo, one.hi) for p, one in found]
    return Series(f"over {baseline}", [(p, one.value) for p, one in found], colour, dots=True, whiskers=whiskers)


def _figures(document: Document) -> Markup:
    """As on the terminal."""
    parts = {"all problems": document.overall.raw}
    if document.overall.flagged:
        parts[f"without {document.overall.flagged} flagged"] = document.overall.filtered
    if len(document.levels) > 1:
        parts |= {f"level {level}": part.raw for level, part in document.levels.items()}
    columns = [dict(figure_rows(found)) if found else {} for found in parts.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    lines = [
        element("tr", element("th", name), *(_figure(column.get(name, "–")) for column in columns)) for name in names
    ]
    head = element("tr", element("th", ""), *(element("th", name, class_="n") for name in parts))
    return figure("Figures", "", data_table(lines, head))


def _figure(words: str) -> Markup:
    value, _, interval = words.partition("\n")
    return element("td", value, " ", element("small", interval), class_="n")


def _problems(rows: Iterable[ProblemRow]) -> Markup:
    heads = {
        "problem": "",
        "answers": "n",
        "compiled": "n",
        "correct": "n",
        "best speedup": "n",
        "faults": "",
        "audit": "",
    }
    head = element("tr", *(element("th", name, class_=class_ or None) for name, class_ in heads.items()))
    return figure("Problems", "", data_table([_problem(row) for row in list(rows)[:MOST]], head, kind="sortable"))


def _problem(row: ProblemRow) -> Markup:
    wrong = ", ".join(
        f"{FAULT_NAMES.get(Fault(fault), fault)} ×{n}" for fault, n in row.faults.items() if fault not in ("", Fault.OK)
    )
    counts = [element("td", n, class_="n", data_v=n) for n in (row.samples, row.compiled, row.correct)]
    best = element("td", numbers.times(row.best_speedup), class_="n", data_v=row.best_speedup or "")
    return element(
        "tr", element("td", row.problem_id), *counts, best, element("td", wrong, class_="w"),
        element("td", ", ".join(row.flags)),
    )  # fmt: skip
