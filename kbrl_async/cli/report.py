"""`kbrl report`: a run as one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from kbrl_async.cli.shared import add_run, check_suffix, find, say
from kbrl_async.durable import write_atomically

FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"where to; default: RUN/{FILE}")
    parser.add_argument("--live", action="store_true", help="serve it on this host while the run goes on, until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="of --live; default: any that is free")
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def run(args: argparse.Namespace) -> int:
    check_suffix(args.output, ".html", "--output", "Write --output FILE.html")
    from kbrl_async.lab.report import read_run, report_page

    path = find(args.run_folder)
    if args.live:
        return _live(path, args)
    output = args.output or path / FILE
    page = report_page(read_run(path))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    say(f"report: {output} ({len(page.encode()) / 1e6:.1f} MB)")
    if args.open:
        webbrowser.open(output.resolve().as_uri())
    return 0


def _live(path: Path, args: argparse.Namespace) -> int:
    from kbrl_async.lab.report import read_run, report_page
    from kbrl_async.lab.report.live import server

    with server(lambda: report_page(read_run(path)), args.port) as serving:
        address = f"http://127.0.0.1:{serving.server_address[1]}"
        say(f"{path.name} at {address}; Ctrl-C ends it")
        if args.open:
            webbrowser.open(address)
        serving.serve_forever()
    return 0
