"""`kbrl prepare`: make the run folder that services started by `honcho start`, systemd or on other hosts will use."""

from __future__ import annotations

import argparse

from kbrl_async.cli import preflight
from kbrl_async.cli.shared import add_settings, resolve
from kbrl_async.runs.folder import plan, prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    config = resolve(args)
    preflight.check(plan(config), starts_here=False)
    run = prepare(config)
    print(run.path)
    return 0
