"""`kbrl report`: a run as one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from rich.console import Console

from kbrl_async.cli.summary import find
from kbrl_async.durable import write_atomically
from kbrl_async.runs.folder import LATEST

NAME = "report"
HELP = "write a run as one self-contained HTML page"
FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", nargs="?", default=LATEST, help="folder or name; default: the newest"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"where to; default: RUN/{FILE}")
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def run(args: argparse.Namespace) -> int:
    from kbrl_async.lab.report import read_run, report_page

    path = find(args.run_folder)
    output = args.output or path / FILE
    page = report_page(read_run(path))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    Console(soft_wrap=True).print(
        f"report: {output} ({len(page.encode()) / 1e6:.1f} MB)", markup=False, highlight=False
    )
    if args.open:
        webbrowser.open(output.resolve().as_uri())
    return 0
