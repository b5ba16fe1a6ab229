"""`kbrl summary`: the result of a run, as it was printed at its end."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec
from rich.console import Console

from kbrl_async.cli import eval as evaluate
from kbrl_async.errors import UserError
from kbrl_async.runs import summary
from kbrl_async.runs.config import environment, load
from kbrl_async.runs.folder import LATEST, SUMMARY_FILE

NAME = "summary"
HELP = "print the result of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", nargs="?", default=LATEST, help="folder or name; default: the newest"
    )


def run(args: argparse.Namespace) -> int:
    show(find(args.run_folder))
    return 0


def find(wanted: str) -> Path:
    """A run folder by its path, or by its name in log_path."""
    named = Path(load(env=environment(os.environ)).log_path) / wanted
    for path in (Path(wanted), named):
        if path.is_dir():
            return path.resolve()
    raise UserError(f"there is no run {wanted}", f"See what there is in {named.parent}/")


def show(run_dir: Path, console: Console | None = None) -> None:
    """Print the table of a finished run."""
    try:
        content = summary.read(run_dir / SUMMARY_FILE)
    except FileNotFoundError:
        cure = f"Continue it with 'kbrl train resume={run_dir}'"
        raise UserError(f"{run_dir} has not ended: it has no {SUMMARY_FILE}", cure) from None
    except msgspec.DecodeError as error:
        raise UserError(f"{run_dir / SUMMARY_FILE} can't be read: {error}", "Restore it from a copy") from None
    if content.get("kind") == evaluate.KIND:
        evaluate.show(run_dir, console)
        return
    (console or Console()).print(summary.render(content))
