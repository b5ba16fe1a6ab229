"""`kbrl compare`: runs side by side, as a table, as a chart and as a page."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kbrl_async.cli.shared import check_suffix, completed, find, run_names, say
from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.runs.folder import SUMMARY_FILE

if TYPE_CHECKING:
    from kbrl_async.lab.report.comparing import Side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs = parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folders or names of runs; NAME=RUN,RUN puts seeds together"
    )
    completed(runs, run_names)
    parser.add_argument("--output", metavar="FILE.html", type=Path, help="write a page with the table and all charts")
    parser.add_argument("--plot", metavar="FILE.svg", type=Path, help="write a chart of one metric of all runs")
    parser.add_argument(
        "--tag",
        default="version/reward_mean",
        help="of the chart: version/… or a TensorBoard tag; default: %(default)s",
    )
    parser.add_argument(
        "--window", type=int, default=3, help="versions or updates that a point is the mean of; default: 3"
    )


def run(args: argparse.Namespace) -> int:
    check_suffix(args.output, ".html", "--output", "Write --output FILE.html; --plot FILE.svg writes a picture")
    check_suffix(args.plot, ".svg", "--plot", "Write --plot FILE.svg")
    from kbrl_async.lab.report import compare_page, comparing, curves

    arms = [_arm(word) for word in args.runs]
    named = curves.named([path for _, paths in arms for path in paths])
    ended = {name: path for name, path in named.items() if (path / SUMMARY_FILE).is_file()}
    for name in named:
        if name not in ended:
            say(f"{name} has not ended; it is in the charts only", Console(stderr=True))
    sides = _sides(arms, {ended[name]: side for name, side in zip(ended, comparing.read(ended), strict=True)})
    window = max(1, args.window)
    if sides:
        Console().print(comparing.table(sides))
        for line in comparing.format_sides(sides):
            say(line)
        if (differing := comparing.settings_table(sides)) is not None:
            Console().print(differing)
    if args.plot:
        chart = curves.chart(named, args.tag, window)
        if chart is None:
            raise UserError(
                f"no run has the tag {args.tag}", "Try version/correct_rate, or see the tags in TensorBoard"
            )
        for name in curves.without(named, args.tag):
            say(f"{name} has no {args.tag} and is not in the chart", Console(stderr=True))
        _write(args.plot, chart, "chart")
    if args.output:
        _write(args.output, compare_page(named, sides, window), "page")
    return 0


def _arm(word: str) -> tuple[str, list[Path]]:
    """The name of what is put together, and its runs; a run alone has none."""
    name, sign, runs = word.partition("=")
    if not sign or Path(word).exists():
        return "", [find(word)]
    if not name or not all(runs.split(",")):
        raise UserError(f"{word} names no runs", "Write NAME=RUN,RUN, such as grpo=runs/a,runs/b,runs/c")
    return name, [find(run) for run in runs.split(",")]


def _sides(arms: Sequence[tuple[str, Sequence[Path]]], of: Mapping[Path, Side]) -> list[Side]:
    from kbrl_async.lab.report.pooling import pooled

    sides = []
    for name, paths in arms:
        ended = [of[path] for path in paths if path in of]
        if ended:
            sides.append(pooled(name, ended) if name else ended[0])
    return sides


def _write(path: Path, text: str, what: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    say(f"{what}: {path}")
