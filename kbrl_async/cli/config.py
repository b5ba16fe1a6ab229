"""`kbrl config`: every key with its default, what it expects and what it does; every metric too."""

from __future__ import annotations

import argparse

from kbrl_async.runs.config import reference
from kbrl_async.runs.telemetry import reference as metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", action="store_true", help="as Markdown, for docs/reference/config.md")
    parser.add_argument("--metrics", action="store_true", help="every metric instead, for docs/reference/metrics.md")


def run(args: argparse.Namespace) -> int:
    if args.metrics or args.docs:
        print(metrics.as_markdown() if args.metrics else reference.as_markdown(), end="")
    else:
        print(reference.as_text())
    return 0
