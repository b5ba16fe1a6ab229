"""What `kbrl verify` and `kbrl bench` share: how one kernel is named, and whose fault it is if it can't be judged."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from kbrl_async.errors import KbrlError, ProblemError, UserError

OUR_FAULT = 3
"""Exit code where the host or the problem failed, not the candidate and not the words of the command."""


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--problem", metavar="FILE|ID", help="a problem file, or an id such as L1/13_softmax or 1/13")
    group.add_argument(
        "--candidate", metavar="FILE", help="a Python file with ModelNew, or a model's answer; - is stdin"
    )
    group.add_argument("--backend", help="what the kernel is written in; default: guessed from its imports")


def judged(command: Callable[[], int], told: Callable[[KbrlError], None] = lambda _error: None) -> int:
    """The command's exit code, or `OUR_FAULT` with the reason on stderr, and to `told` before.

    :raises UserError: wrong usage; but a problem that does not hold the contract is our fault.
    """
    try:
        return command()
    except KbrlError as error:
        if isinstance(error, UserError) and not isinstance(error, ProblemError):
            raise
        told(error)
        print(f"error: {error}", file=sys.stderr)
        return OUR_FAULT
