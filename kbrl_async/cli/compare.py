"""`kbrl compare`: finished runs side by side, as a table and as charts."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from kbrl_async.cli.summary import find
from kbrl_async.config import SUMMARY_FILE
from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.telemetry import compare

NAME = "compare"
HELP = "put runs side by side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders or names of runs")
    parser.add_argument("--plot", metavar="FILE.svg", type=Path, help="write a chart of one metric of all runs")
    parser.add_argument("--tag", default="reward/mean", help="TensorBoard tag of the chart; default: %(default)s")
    parser.add_argument("--window", type=int, default=3, help="updates that a point is the mean of; default: 3")


def run(args: argparse.Namespace) -> int:
    paths = [find(wanted) for wanted in args.runs]
    ended = [path for path in paths if (path / SUMMARY_FILE).is_file()]
    for path in paths:
        if path not in ended:
            Console(stderr=True).print(f"{path.name} has not ended; it is in the chart only")
    if ended:
        Console().print(compare.table(compare.summaries(ended)))
    if args.plot:
        chart = compare.chart({path.name: path for path in paths}, args.tag, max(1, args.window))
        if "<polyline" not in chart:
            raise UserError(f"no run has the tag {args.tag}", "See the tags in TensorBoard; tensorboard.enabled=true")
        write_atomically(args.plot, chart)
        Console().print(f"chart: {args.plot}")
    return 0
