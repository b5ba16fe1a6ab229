"""`kbrl prepare`: make the run folder that services started by `honcho start`, systemd or on other hosts will use."""

from __future__ import annotations

import argparse

from kbrl_async.cli import preflight, settings
from kbrl_async.runs.folder import plan, prepare

NAME = "prepare"
HELP = "make a run folder and point runs/latest at it, for services that are started by other means"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = settings.resolve(args)
    preflight.check(plan(config))
    run = prepare(config)
    print(run.path)
    return 0
