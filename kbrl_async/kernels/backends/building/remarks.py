"""What the compiler says of each loop of a C source: vectorised, and how wide; or not, and why."""

from __future__ import annotations

import re

import msgspec

FLAGS = ("-fopt-info-vec-optimized-missed",)
"""gcc's; the remarks are on stderr."""
_LINE = re.compile(r"^(?:[^:\s]*/)?(?P<file>[\w.+-]+):(?P<line>\d+):\d+: (?P<kind>optimized|missed): +(?P<text>.+)$")
_WIDTH = re.compile(r"loop vectorized using (?:variable length|(\d+) byte) vectors")
_REASON = re.compile(r"^not vectorized: (.+)$")
_LOOP = "couldn't vectorize loop"
_WORDS = 120
"""Of a reason, in characters."""


class Remark(msgspec.Struct, frozen=True):
    """Of one loop."""

    line: int
    """In the source that was compiled."""
    width: int = 0
    """Bytes of the widest vectors; 0: it was not vectorised."""
    reason: str = ""

    def text(self) -> str:
        if self.width:
            return f"line {self.line}: vectorised, {self.width} bytes at a time"
        return f"line {self.line}: not vectorised{f': {self.reason}' if self.reason else ''}"


def read(output: str, file: str = "kernel.c") -> tuple[Remark, ...]:
    """Of the loops in `file`, by line. One that is vectorised anywhere (main loop, epilogue) counts as vectorised."""
    widths: dict[int, int] = {}
    reasons: dict[int, str] = {}
    missed = 0
    for found in filter(None, map(_LINE.match, output.splitlines())):
        line, text = int(found["line"]), found["text"].strip()
        if found["file"] != file:
            missed = 0
        elif found["kind"] == "optimized":
            if width := _WIDTH.search(text):
                widths[line] = max(widths.get(line, 0), int(width[1] or 16))
            missed = 0
        elif text == _LOOP:
            missed = line
            reasons.setdefault(line, "")
        elif missed and (reason := _REASON.match(text)):
            reasons[missed] = reasons[missed] or _short(reason[1])
    lines = sorted({*widths, *reasons})
    return tuple(Remark(line, widths.get(line, 0), "" if line in widths else reasons[line]) for line in lines)


def lines(remarks: tuple[Remark, ...]) -> tuple[str, ...]:
    """As text, what was not vectorised first."""
    return tuple(remark.text() for remark in sorted(remarks, key=lambda remark: remark.width > 0))


def _short(reason: str) -> str:
    """Without the compiler's own names for values."""
    plain = re.sub(r"\b_\d+\b|:?\s*\S+ = .*$", "", reason).strip(" .:")
    return plain[:_WORDS]
