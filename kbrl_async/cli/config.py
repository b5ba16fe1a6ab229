"""`kbrl config`: every key with its default, what it takes and does, or one with its value; every metric too."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from kbrl_async.cli.shared import add_config, completed
from kbrl_async.runs.config import KEYS, Config, environment, reference
from kbrl_async.runs.config.keys import SECTIONS, flat
from kbrl_async.runs.config.loading import find_key, format_value, gather, resolve
from kbrl_async.runs.config.sources import Setting
from kbrl_async.runs.telemetry import reference as metrics

EPILOG = """\
examples:
  kbrl config max_staleness                   its value here, and what it does
  kbrl config learner                         all keys of a section
  kbrl config batch_size --config my.yaml     what a file makes of it
  kbrl config loss --config runs/default/config.yaml
                                              what a run was made with
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    words = add_config(parser, "KEY|key=value", "keys or sections to explain; settings, as elsewhere")
    completed(words, lambda **_: [*KEYS, *SECTIONS])
    parser.add_argument("--docs", action="store_true", help="as Markdown, for docs/reference/config.md")
    parser.add_argument("--metrics", action="store_true", help="every metric instead, for docs/reference/metrics.md")


def run(args: argparse.Namespace) -> int:
    keys = [word for word in args.overrides if "=" not in word]
    if args.metrics or args.docs:
        print(metrics.as_markdown() if args.metrics else reference.as_markdown(), end="")
    elif keys:
        overrides = [word for word in args.overrides if "=" in word]
        settings = gather(args.config, overrides, environment(os.environ))
        config = resolve(settings)
        print("\n\n".join(format_key(name, settings, config) for word in keys for name in _names(word)))
    else:
        print(reference.as_text())
    return 0


def _names(word: str) -> list[str]:
    """The key, or those of the section."""
    if word in SECTIONS:
        return [name for name in KEYS if name.startswith(f"{word}.")]
    return [find_key(word).name]


def format_key(name: str, settings: Sequence[Setting], config: Config) -> str:
    """One key: its value, where that was set, its default, what it takes and does."""
    key = KEYS[name]
    said = [setting for setting in settings if setting.key == name]
    origin = said[-1].origin if said else "the default"
    over = ", ".join(f"{format_value(setting.value)} ({setting.origin})" for setting in reversed(said[:-1]))
    lines = [
        f"{name} = {format_value(flat(config)[name])}",
        *reference.indented(key.doc),
        *reference.indented(f"set by:  {origin}{f', over {over}' if over else ''}"),
        *reference.indented(f"default: {format_value(key.default)}"),
        *reference.indented(f"takes:   {key.expects}"),
    ]
    return "\n".join(lines)
