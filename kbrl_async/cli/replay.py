"""`kbrl replay`: a run again, deterministically, or one batch through the loss again.

The work is done by `services.replay`, in a process of its own: this floor imports no service.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from kbrl_async.cli.shared import find
from kbrl_async.errors import UserError
from kbrl_async.runs.folder import LATEST

BATCH = "batch-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="RUN|BATCH",
        nargs="?",
        default=LATEST,
        help="a run, by folder or name (default: the newest), or a batch, by id (batch-000003) or folder",
    )
    parser.add_argument("--run", metavar="RUN", default=LATEST, help="the run of a batch that is named by its id")
    parser.add_argument("--no-train", action="store_true", help="a run: its decisions only, not the learner's updates")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    run_dir, batch = target(args.target, args.run)
    if batch and args.no_train:
        raise UserError("a batch is replayed by training on it", "Leave out --no-train")
    flags = [*(["--batch", batch] if batch else []), *(["--no-train"] if args.no_train else [])]
    flags += ["--json"] if args.json else []
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "services.replay", str(run_dir), *flags], check=False).returncode


def target(wanted: str, run: str) -> tuple[Path, str]:
    """The run's folder, and the batch's id (empty: the whole run)."""
    name = Path(wanted).name
    if not name.startswith(BATCH) or not name.removeprefix(BATCH).isdigit():
        return find(wanted), ""
    folder = Path(wanted)
    if folder.is_dir():
        return folder.resolve().parent.parent, name
    return find(run), name
