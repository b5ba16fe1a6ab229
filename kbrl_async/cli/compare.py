"""`kbrl compare`: runs side by side, as a table, as a chart and as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from kbrl_async.cli.shared import check_suffix, completed, find, run_names, say
from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.runs.folder import SUMMARY_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs = parser.add_argument("runs", metavar="RUN", nargs="+", help="folders or names of runs")
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

    named = curves.named([find(wanted) for wanted in args.runs])
    ended = {name: path for name, path in named.items() if (path / SUMMARY_FILE).is_file()}
    for name in named:
        if name not in ended:
            say(f"{name} has not ended; it is in the charts only", Console(stderr=True))
    sides = comparing.read(ended)
    window = max(1, args.window)
    if sides:
        Console().print(comparing.table(sides))
        for line in comparing.told(sides):
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


def _write(path: Path, text: str, what: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    say(f"{what}: {path}")
