"""Whether the figures that a run printed are true: each is made again from its archive, another way, and compared.

::

    RUN/rollouts.sqlite ─ SQL, plain msgpack, formulas of its own ─▶ figures ─┐
    RUN/summary.json, and what `kbrl summary RUN` prints ─────────────────────┴─▶ a table; exit 1 on a difference

`python -m benchmarks.figures RUN` is short for `… check RUN`.

Nothing here calls what it checks: the archive is read as a database, records as plain data, and intervals come from
other formulas (Wilson's as the roots of its quadratic). What the summary takes from the journal (which answers count,
which groups were cut off) is taken from the archive here.

What it does not see: how busy processes were and what was too old to be scored, which are not in the archive;
`wall_s` is only about the same, because the clock of a score is read before it is archived. The first policy version
of a group that ended without one recorded answer is taken from the group before it.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.figures.again import again
from benchmarks.figures.archive import ArchivedTurns
from benchmarks.figures.versions import NAMES
from benchmarks.harness import Commands, Result, environment, kbrl_command
from kbrl_async.errors import CheckpointError

commands = Commands("figures", __doc__)

CLOSE = 1e-9
PREFIXES = {
    "held-out problems": "heldout_",
    "of families that are trained on": "heldout_instance_",
    "of families that are not": "heldout_family_",
    "flagged problems": "heldout_filtered_",
}
"""Of the fields, by the end of a part's title on the terminal."""
NO_FIGURE = (
    "run",
    "seed",
    "method",
    "loss",
    "advantage",
    "preset",
    "config_hash",
    "versions",
    "demonstrations",
    "heldout_kinds",
)
_CELLS = re.compile(r"\s*[│┃]\s*")
_PART = re.compile(r"(?:First|last): ([\d,]+) answers? of versions? (\d+)(?:–(\d+))?")


class FigurePair(NamedTuple):
    name: str
    printed: Any
    again: Any
    is_equal: bool


@commands
def check(run: Path, /) -> Result:
    """Every figure of a run that has ended, printed and made again."""
    if not (summary := run / "summary.json").is_file():
        raise CheckpointError(f"{run} has no summary.json", "Give a run that has ended")
    printed = msgspec.json.decode(summary.read_bytes())
    made = dict(again(ArchivedTurns(run / "rollouts.sqlite"), run))
    found = [*_fields(printed, made), *_texts(run, made)]
    _show(run, found)
    different = [one.name for one in found if not one.is_equal]
    covered = {*made, "groups_add_up", "updates_per_hour", "first_and_last"}
    left = [name for name in printed if name not in covered and name not in NO_FIGURE]
    return {"ok": not different, "compared": len(found), "different": different, "not_compared": left}


def _fields(printed: Mapping[str, Any], made: Mapping[str, Any]) -> Iterator[FigurePair]:
    for name, value in made.items():
        there = _there(printed, name)
        is_equal = math.isclose(there, value, rel_tol=0.05, abs_tol=1.0) if name == "wall_s" else _equal(there, value)
        yield FigurePair(name, there, value, is_equal)
    ends = sum(made[f"groups_{end}"] for end in ("trained", "filtered", "dropped_stale", "failed"))
    adds_up = ends == made["groups_admitted"]
    yield FigurePair("groups_add_up", printed["groups_add_up"], adds_up, printed["groups_add_up"] == adds_up)
    hourly = made["updates"] / printed["wall_s"] * 3600 if printed["wall_s"] else 0.0
    yield FigurePair(
        "updates_per_hour", printed["updates_per_hour"], hourly, _equal(printed["updates_per_hour"], hourly)
    )


def _there(printed: Mapping[str, Any], name: str) -> Any:
    """A field, as far as this can know it: not where a kernel lies, nor that a prompt was too long."""
    if name == "best_kernels":
        return [{key: value for key, value in kernel.items() if key != "file"} for kernel in printed[name]]
    if name == "rollouts_lost":
        lost = dict(printed[name])
        too_long = lost.pop("prompt_too_long", 0)
        return lost | ({"infra_error": lost.get("infra_error", 0) + too_long} if too_long else {})
    return printed.get(name)


def _equal(one: Any, other: Any) -> bool:
    match one, other:
        case (int() | float(), int() | float()):
            return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
        case (list() | tuple(), list() | tuple()):
            return len(one) == len(other) and all(map(_equal, one, other))
        case (Mapping(), Mapping()):
            return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


# ── what stands on the terminal ───────────────────────────────────────────────────────────────────────────────────


def _texts(run: Path, made: Mapping[str, Any]) -> Iterator[FigurePair]:
    text = _printed(run)
    rows = [[cell for cell in _CELLS.split(line) if cell] for line in text.splitlines()]
    for prefix, ends, named in _tables(rows):
        for name in named:
            for cell, end in zip(named[name], ends, strict=True):
                wanted = _cell(name, made[f"{prefix}{name}_{end}"], made.get(f"{prefix}{name}_{end}_95"))
                yield FigurePair(f"terminal: {prefix}{name}_{end}", cell, wanted, cell == wanted)
    parts = [[int(number.replace(",", "")) for number in found if number] for found in _PART.findall(text)]
    for which, words in zip(("first", "last"), parts, strict=False):
        wanted_part = [made[f"answers_{which}"], *dict.fromkeys(made[f"versions_{which}"])]
        yield FigurePair(f"terminal: {which}", words, wanted_part, words == wanted_part)
    shown = [row[:3] for row in rows if len(row) > 2 and "…" in row[2] and row[0] not in NAMES and row[1].endswith("×")]
    kernels = [[k["problem"], f"{k['speedup']:.2f}×", f"{k['lo']:.2f} … {k['hi']:.2f}"] for k in made["best_kernels"]]
    yield FigurePair("terminal: fastest kernels", shown, kernels, shown == kernels)


def _printed(run: Path) -> str:
    variables = environment(COLUMNS="400", NO_COLOR="1")
    return subprocess.run(
        kbrl_command("summary", run), env=variables, text=True, stdout=subprocess.PIPE, check=True
    ).stdout


def _tables(rows: list[list[str]]) -> Iterator[tuple[str, tuple[str, str], dict[str, list[str]]]]:
    """(prefix of the fields, ends of their names, cells by name) of training, of held-out problems, and of those
    without the flagged ones."""
    prefix, ends, found = "", ("first", "last"), dict[str, list[str]]()
    for row in rows:
        if len(row) == 3 and row[1].startswith("before"):
            yield prefix, ends, found
            prefix = next(of for words, of in PREFIXES.items() if row[0].endswith(words))
            ends, found = ("before", "after"), {"answers": [_count(cell) for cell in row[1:]]}
        elif len(row) == 3 and row[0] in (*NAMES, "success_rate", "compile_fix_rate"):
            found[row[0]] = row[1:]
    yield prefix, ends, found


def _count(cell: str) -> str:
    return cell.partition(": ")[2]


def _cell(name: str, value: float | None, ends: tuple[float, float] | None) -> str:
    if value is None:
        return "–"
    if name == "answers":
        return f"{value} answers"
    form = {"reward_mean": "{:.3f}", "speedup_mean": "{:.2f}×"}.get(name, "{:.0%}")
    if not ends:
        return form.format(value)
    says_nothing = name == "speedup_mean" and ends[1] / 100 > ends[0]
    return f"{form.format(value)} ({'too few' if says_nothing else ' … '.join(map(form.format, ends))})"


def _show(run: Path, found: list[FigurePair]) -> None:
    table = Table(title=f"Figures of {run}", title_justify="left")
    for heading in ("figure", "printed", "again", ""):
        table.add_column(heading, overflow="fold")
    for one in found:
        table.add_row(one.name, _short(one.printed), _short(one.again), "=" if one.is_equal else "DIFFERENT")
    Console(width=160).print(table)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(inside)}" for key, inside in value.items())
    return str(value)


if __name__ == "__main__":
    words = sys.argv[1:]
    is_run = bool(words) and not words[0].startswith("-") and words[0] not in commands.functions
    commands.main(["check", *words] if is_run else words)
