"""An evaluation for people: tables on the terminal, scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from kbrl_async.evaluation.document import AuditedPart, Document, Figures
from kbrl_async.evaluation.metrics import EAGER, THRESHOLDS, Figure
from kbrl_async.evaluation.proportions import WORDS


def render(document: Document) -> Group:
    """The table of figures, and the table of problems."""
    tables = [_figures_table(document)]
    if document.problems:
        tables.append(_problems_table(document))
    return Group(*tables)


def _figures_table(document: Document) -> Table:
    overall = document.overall
    columns: list[tuple[str, Figures | None]] = [("all problems", overall.raw)]
    if overall.flagged:
        columns.append((f"without {overall.flagged} flagged", overall.filtered))
    columns += [(f"level {level}", part.raw) for level, part in document.levels.items() if len(document.levels) > 1]
    table = Table(title=f"Evaluation of {document.policy.get('label', 'a policy')}", title_justify="left")
    table.add_column("")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    shown = [dict(figure_rows(found)) if found else {} for _, found in columns]
    for name in dict(figure_rows(overall.raw)) if overall.raw else {}:
        table.add_row(name, *(rows.get(name, "–") for rows in shown))
    table.caption = _caption(document)
    table.caption_justify = "left"
    return table


def _caption(document: Document) -> str:
    words = [f"the interval below each figure is its {WORDS} bootstrap interval over problems"]
    if reached := document.policy.get("small_policy_cut"):
        words.append(f"the small policy was cut at {reached} by sft.max_seconds, so it is worse than a whole one")
    if document.expired:
        words.append(f"{document.expired} samples were given up at a deadline and count as wrong")
    if document.lost:
        listed = ", ".join(f"{count} {reason}" for reason, count in document.lost.items())
        words.append(f"no verdict through no fault of the policy, in no figure: {listed}")
    words += [f"{problem} was not asked: {why}" for problem, why in list(document.skipped.items())[:3]]
    if len(document.skipped) > 3:
        words.append(f"{len(document.skipped)} problems in all were not asked")
    return "; ".join(words)


def figure_rows(figures: Figures) -> Iterator[tuple[str, str]]:
    yield "problems × samples", f"{figures.problems} × {figures.samples / figures.problems:g}"
    yield "compiled", _share(figures.compiled)
    yield "correct", _share(figures.correct)
    yield "caught cheating", _share(figures.hacked)
    for k, figure in figures.pass_at_k.items():
        yield f"pass@{k}", _share(figure)
    for baseline, speeds in figures.speedup.items():
        against = "" if baseline == EAGER else f" vs {baseline}"
        for p in THRESHOLDS[1:]:
            yield f"fast_{p:g}{against}", _share(speeds.fast_p[f"{p:g}"])
        yield f"fast_1_proven{against}", _share(speeds.fast_1_proven)
        yield f"speedup, geometric mean{against}", _times(speeds.geometric_mean)
        yield f"speedup, median{against}", _times(speeds.median)
    for kind, found in figures.trust.items():
        yield f"correct, {kind}", str(found.correct)
        yield f"fast_1_proven, {kind}", _share(found.fast_1_proven)


def _share(figure: Figure) -> str:
    return f"{figure.value:.1%}" + (f"\n{figure.lo:.0%} … {figure.hi:.0%}" if _is_told(figure) else "")


def _is_told(figure: Figure) -> bool:
    """A bootstrap of problems that are all alike knows no interval."""
    return figure.lo < figure.hi


def _times(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    return f"{figure.value:.2f}×" + (f"\n{figure.lo:.2f} … {figure.hi:.2f}" if _is_told(figure) else "")


def _problems_table(document: Document) -> Table:
    table = Table(title="Problems", title_justify="left")
    for heading in ("problem", "compiled", "correct", "best speedup", "what went wrong", "audit"):
        table.add_column(heading, justify="right" if heading in ("compiled", "correct", "best speedup") else "left")
    for row in document.problems:
        wrong = ", ".join(f"{fault.replace('_', ' ')} ×{n}" for fault, n in row.faults.items() if fault != "ok")
        best = [] if row.best_speedup is None else [f"{row.best_speedup:.2f}×"]
        best += [f"disturbed ×{row.disturbed}"] if row.disturbed else []
        counts = (f"{row.compiled}/{row.samples}", f"{row.correct}/{row.samples}")
        table.add_row(row.problem_id, *counts, ", ".join(best) or "–", wrong, ", ".join(row.flags))
        for name, one in row.workloads.items():
            speed = "–" if one.best_speedup is None else f"{one.best_speedup:.2f}×"
            table.add_row(f"  {name}", "", f"{one.correct}/{one.samples}", speed, "", "")
    return table


def scalars(document: Document) -> dict[str, float]:
    """TensorBoard tag → value: `eval/…`, `eval_filtered/…`, `eval_level1/…`."""
    parts: list[tuple[str, AuditedPart]] = [("", document.overall)]
    parts += [(f"_level{level}", part) for level, part in document.levels.items()]
    found: dict[str, float] = {}
    for name, part in parts:
        found |= _tagged(f"eval{name}", part.raw)
        if part.flagged:
            found |= _tagged(f"eval_filtered{name}", part.filtered)
    return found


def _tagged(prefix: str, figures: Figures | None) -> dict[str, float]:
    if figures is None:
        return {}
    rates = {"compile_rate": figures.compiled, "correct_rate": figures.correct, "hack_rate": figures.hacked}
    rates |= {f"pass_at_{k}": figure for k, figure in figures.pass_at_k.items()}
    for baseline, speeds in figures.speedup.items():
        against = "" if baseline == EAGER else f"_vs_{baseline}"
        rates |= {f"fast_{p}{against}": figure for p, figure in speeds.fast_p.items()}
        rates[f"fast_1_proven{against}"] = speeds.fast_1_proven
        means = {"geometric_mean": speeds.geometric_mean, "median": speeds.median}
        rates |= {f"speedup_{name}{against}": figure for name, figure in means.items() if figure is not None}
    ends = {f"{tag}_{end}": getattr(rates[tag], end) for tag in ("correct_rate",) for end in ("lo", "hi")}
    return {f"{prefix}/{tag}": figure.value for tag, figure in rates.items()} | {
        f"{prefix}/{tag}": value for tag, value in ends.items()
    }
