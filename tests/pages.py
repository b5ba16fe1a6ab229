"""The pages of the documentation, read once: their commands, links, headings, and what stands in backticks.

::

    README.md, docs/**, deploy/README.md ─▶ Page ─▶ blocks ─▶ commands (```sh, one a line, \\ and for-loops joined)
                                                └▶ prose  ─▶ links, inline code, headings
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^\s*```(\w*)\s*$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_COMMENT = re.compile(r"(^|\s)#(\s.*|$)")


class Block(msgspec.Struct, frozen=True):
    """A fenced block."""

    line: int
    """Of its first line in the page."""
    language: str
    lines: tuple[str, ...]


class Command(msgspec.Struct, frozen=True):
    page: str
    line: int
    text: str
    """Without comments; a loop as one command."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class Page:
    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix()
        self._lines = (path.read_text(encoding="utf-8") if text is None else text).splitlines()

    @cached_property
    def blocks(self) -> list[Block]:
        found: list[Block] = []
        begun: int | None = None
        language = ""
        for number, line in enumerate(self._lines):
            fence = _FENCE.match(line)
            if fence and begun is None:
                begun, language = number + 1, fence[1]
            elif fence and begun is not None:
                found.append(Block(begun + 1, language, tuple(self._lines[begun:number])))
                begun = None
        assert begun is None, f"{self.name}: a fence is not closed"
        return found

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """(number, line) of what is in no block."""
        inside = {n for block in self.blocks for n in range(block.line - 1, block.line + len(block.lines) + 1)}
        return [(n, line) for n, line in enumerate(self._lines, start=1) if n not in inside]

    @property
    def commands(self) -> list[Command]:
        return [command for block in self.blocks if block.language == "sh" for command in self._commands(block)]

    def _commands(self, block: Block) -> Iterator[Command]:
        begun, text = block.line, ""
        for number, raw in enumerate(block.lines, start=block.line):
            line = _COMMENT.sub("", raw).rstrip()
            begun = begun if text else number
            if line.strip():
                between = " ; " if text.startswith("for ") else " "
                text = f"{text}{between}{line.strip()}" if text else line.strip()
            if text.endswith("\\"):
                text = text.removesuffix("\\").rstrip()
            elif text and not (text.startswith("for ") and not text.endswith("done")):
                yield Command(self.name, begun, " ".join(text.split()))
                text = ""
        assert not text, f"{self.name}:{begun} does not end: {text}"

    @property
    def code(self) -> list[tuple[int, str]]:
        """(line, text) of what stands in backticks."""
        return [(number, text) for number, line in self.prose for text in _CODE.findall(line)]

    @property
    def links(self) -> list[tuple[int, str]]:
        return [
            (number, target) for number, line in self.prose for target in _LINK.findall(_CODE.sub("", line) or line)
        ]

    @cached_property
    def anchors(self) -> set[str]:
        """Those of its headings, as GitHub makes them."""
        found: set[str] = set()
        for _, line in self.prose:
            if heading := re.match(r"#{1,6}\s+(.+?)\s*$", line):
                words = re.sub(r"[^\w\s-]", "", heading[1].replace("`", "").lower())
                found.add(re.sub(r"\s", "-", words))
        return found


def pages() -> list[Page]:
    """Every page that promises something."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy" / "README.md"]
    return [Page(path) for path in paths]
