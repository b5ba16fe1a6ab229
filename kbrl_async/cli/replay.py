"""`kbrl replay`: a run again, deterministically, or one batch through the loss again.

The work is done by `services.replay`, in a process of its own: this floor imports no service.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kbrl_async.cli.shared import add_old_run, completed, find, run_names, run_of
from kbrl_async.errors import UserError
from kbrl_async.runs.folder import LATEST


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = parser.add_argument(
        "words",
        metavar="[RUN] [BATCH]",
        nargs="*",
        help="a run by folder or name (default: the newest); one of its batches by id, batch-000003, or by folder",
    )
    completed(words, run_names)
    add_old_run(parser)
    parser.add_argument("--no-train", action="store_true", help="a run: its decisions only, not the learner's updates")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    run_dir, batch = target(args.words)
    if args.old_run is not None:
        run_dir = run_of(args)
    if batch and args.no_train:
        raise UserError("a batch is replayed by training on it", "Leave out --no-train")
    flags = [*(["--batch", batch] if batch else []), *(["--no-train"] if args.no_train else [])]
    flags += ["--json"] if args.json else []
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "services.replay", str(run_dir), *flags], check=False).returncode


def target(words: Sequence[str]) -> tuple[Path, str]:
    """The run's folder, and the batch's id (empty: the whole run).

    :raises UserError: more than a run and a batch.
    """
    batches = [word for word in words if re.fullmatch(r"batch-\d+", Path(word).name)]
    runs = [word for word in words if word not in batches]
    if len(batches) > 1 or len(runs) > 1:
        raise UserError(f"one run and one batch at a time, not {' '.join(words)}", "Write kbrl replay RUN batch-000003")
    folder = Path(batches[0]) if batches else None
    if folder is not None and folder.is_dir():
        return folder.resolve().parent.parent, folder.name
    return find(runs[0] if runs else LATEST), folder.name if folder else ""
