"""What `kbrl optimize` shows: a live line while it searches, and the conclusion."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kbrl_async.lab.optimize import evidence
from kbrl_async.lab.optimize.proving import Final, Proof
from kbrl_async.lab.optimize.search import Search
from kbrl_async.lab.optimize.targets import Target


def live(console: Console) -> tuple[Progress, TaskID]:
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console)
    return progress, progress.add_task("starting", total=1.0)


def status(search: Search) -> str:
    """One line: how many attempts, how many proven, the best so far."""
    total = evidence.counts(search)
    words = [f"{total['attempts']} attempts", f"{total['distinct']} verified", f"{total['proven']} proven"]
    best = search.best
    judged = best.judgement if best is not None else None
    if judged is not None and judged.speedup is not None:
        words.append(f"best {judged.speedup:.2f}× [{judged.lo:.2f}, {judged.hi:.2f}]")
    elif not total["proven"] and (failures := search.tree.failures()):
        words.append(f"furthest: {escape(evidence.described(failures[0]))}")
    return " · ".join(words)


def conclude(
    console: Console,
    target: Target,
    search: Search,
    proof: Proof | None,
    finals: Sequence[Final],
    files: Sequence[str],
) -> None:
    console.print(f"[bold]{escape(target.title)}[/bold]: {evidence.conclusion(proof, search, finals)}")
    if proof is not None:
        console.print(_facts(evidence.proof_rows(proof.winner.result)))
    else:
        _explain(console, search, finals)
    for line in evidence.tree_lines(search, most=12):
        console.print("  " + line, markup=False, highlight=False)
    console.print(f"written: {', '.join(files)}", markup=False)


def _explain(console: Console, search: Search, finals: Sequence[Final]) -> None:
    for final in finals:
        console.print(f"attempt {final.attempt}, examined again: {final.result!r}", markup=False)
    if search.tree.proven():
        console.print("--allow-slower writes a proven kernel that is not faster", markup=False)
        return
    table = Table("attempt", "verdict", "what")
    for row in evidence.failures(search):
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, text in rows:
        facts.add_row(name, escape(text))
    return facts
