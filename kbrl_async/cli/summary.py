"""`kbrl summary`: the result of a run, as it was printed at its end."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console

from kbrl_async.cli import eval as evaluate
from kbrl_async.cli.shared import add_run, find, print_json
from kbrl_async.errors import UserError
from kbrl_async.runs import summary
from kbrl_async.runs.folder import SUMMARY_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print summary.json, which has more than the table")


def run(args: argparse.Namespace) -> int:
    run_dir = find(args.run_folder)
    if args.json:
        print_json(_read(run_dir), pretty=True)
    else:
        show(run_dir)
    return 0


def show(run_dir: Path, console: Console | None = None) -> None:
    """Print the table of a finished run."""
    content = _read(run_dir)
    if content.get("kind") == evaluate.KIND:
        evaluate.show(run_dir, console)
        return
    (console or Console()).print(summary.render(content))


def _read(run_dir: Path) -> summary.Summary:
    """:raises UserError: the run has not ended, or its file is damaged."""
    try:
        return summary.read(run_dir / SUMMARY_FILE)
    except FileNotFoundError:
        cure = f"Continue it with 'kbrl train resume={run_dir}'"
        raise UserError(f"{run_dir} has not ended: it has no {SUMMARY_FILE}", cure) from None
    except msgspec.DecodeError as error:
        raise UserError(f"{run_dir / SUMMARY_FILE} can't be read: {error}", "Restore it from a copy") from None
