"""The reference of all keys, made from the schema: plain text for the terminal, Markdown for docs/."""

from __future__ import annotations

import inspect
import textwrap

from kbrl_async.runs.config.keys import KEYS, SECTIONS, Key
from kbrl_async.runs.config.loading import format_value
from kbrl_async.runs.config.schema import Config


def _sections() -> list[tuple[str, str, list[Key]]]:
    """(section, its purpose, its keys), the keys at the top first."""
    groups = {"": inspect.getdoc(Config) or ""} | {name: inspect.getdoc(kind) or "" for name, kind in SECTIONS.items()}
    return [
        (name, doc, [key for key in KEYS.values() if key.name.rpartition(".")[0] == name])
        for name, doc in groups.items()
    ]


def as_text(width: int = 80) -> str:
    """`key = default`, what it does, and what it takes, for the terminal."""
    lines: list[str] = []
    for section, purpose, keys in _sections():
        heading = f"{section}: {purpose}" if section else "keys at the top"
        lines += [*textwrap.wrap(heading, width, initial_indent="# ", subsequent_indent="# "), ""]
        for key in keys:
            lines.append(f"{key.name} = {format_value(key.default)}")
            lines += [*indented(key.doc, width), *indented(f"takes {key.expects}", width)]
        lines.append("")
    return "\n".join(lines)


def indented(text: str, width: int = 80) -> list[str]:
    """The text as what stands under a key."""
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def as_markdown() -> str:
    """docs/reference/config.md."""
    lines = [
        "# Configuration",
        "",
        "Made by `make docs` from `kbrl_async/runs/config/schema.py`; `kbrl config` prints the same.",
        "",
    ]
    for section, purpose, keys in _sections():
        lines += [f"## {section}" if section else "## Keys at the top", purpose, ""] if section else []
        lines += ["| key | default | expects | |", "|---|---|---|---|"]
        lines += [f"| `{key.name}` | `{format_value(key.default)}` | {key.expects} | {key.doc} |" for key in keys]
        lines.append("")
    return "\n".join(lines)
