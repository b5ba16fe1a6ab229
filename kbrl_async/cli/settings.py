"""The arguments of every command that takes a configuration, and reading it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import SCALABLE, Config, environment
from kbrl_async.runs.config.loading import gather
from kbrl_async.runs.config.loading import resolve as resolved
from kbrl_async.runs.config.sources import Setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", type=Path, action="append", default=[], help="YAML or TOML; later files win"
    )
    parser.add_argument(
        "--processes",
        metavar="NAME=COUNT",
        action="append",
        default=[],
        help=f"how many of {', '.join(SCALABLE)} to start, such as compile_farm=2,sampler=1",
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="settings that win over files; 'kbrl config' lists them"
    )


def resolve(args: argparse.Namespace) -> Config:
    """The configuration: files < KBRL_* variables (.env, then the shell) < the command line."""
    return resolved(gathered(args))


def gathered(args: argparse.Namespace) -> list[Setting]:
    """The settings that make it, with their origins."""
    overrides = [*args.overrides, *_process_overrides(args.processes)]
    return gather(args.config, overrides, environment(os.environ))


def _process_overrides(words: Sequence[str]) -> Iterator[str]:
    for part in ",".join(words).split(","):
        name, _, count = part.partition("=")
        if part and name not in SCALABLE:
            raise ConfigError(f"--processes {part}: only {', '.join(SCALABLE)} can be several", "Write compile_farm=2")
        if part:
            yield f"processes.{name}={count}"
