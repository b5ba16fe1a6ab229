"""`kbrl config`: every key with its default, what it expects and what it does."""

from __future__ import annotations

import argparse

from kbrl_async.config import reference

NAME = "config"
HELP = "print every setting with its default and meaning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", action="store_true", help="as Markdown, for docs/configuration.md")


def run(args: argparse.Namespace) -> int:
    print(reference.as_markdown() if args.docs else reference.as_text())
    return 0
