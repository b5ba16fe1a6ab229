"""HTML that is safe by construction: text is escaped unless this module made it.

Invariants
* A `Markup` is only made here, by `element`, and by those who pass it constants of this project or another library's
  escaped output.
* What a candidate wrote can't leave its element, can't hide itself (control and bidirectional characters are shown as
  what they are), and can't make a line or a text longer than asked for.

::

    element("p", "a < b", class_="note")  ─▶  <p class="note">a &lt; b</p>
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_VOID = frozenset({"br", "hr", "input", "meta", "link", "img"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()

    def __add__(self, other: str) -> Markup:
        return Markup(str.__add__(self, escape(other)))


Content = str | Markup | int | float | None


def visible(text: str) -> str:
    """The text with every character that a browser would hide, or that would reorder others, spelled out."""
    return _SURROGATES.sub("\ufffd", _HIDDEN.sub(_picture, text.replace("\r\n", "\n")))


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def escape(content: Content) -> Markup:
    """The content as HTML text; `Markup` stays as it is, None is nothing."""
    if isinstance(content, Markup):
        return content
    return Markup("" if content is None else html.escape(visible(str(content))))


def element(name: str, /, *children: Content, **attributes: Content | bool) -> Markup:
    """One element. `class_` is `class`, other underscores are hyphens; an attribute of None or False is left out."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    inside = "".join(map(escape, children))
    return Markup(f"<{name}{shown}>" if name in _VOID else f"<{name}{shown}>{inside}</{name}>")


def _attribute(key: str, value: Content | bool) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(value)}"'


def join(parts: Iterable[Content], between: str = "") -> Markup:
    return Markup(escape(between).join(map(escape, parts)))


def clipped(text: str, *, lines: int = 400, columns: int = 240) -> tuple[str, str]:
    """(the text within so many lines and columns, what was left out in words or "")."""
    rows = text.split("\n")
    wide = sum(len(row) > columns for row in rows[:lines])
    kept = [row if len(row) <= columns else f"{row[:columns]} …" for row in rows[:lines]]
    notes = []
    if len(rows) > lines:
        notes.append(f"{len(rows) - lines:,} more lines")
    if wide:
        notes.append(f"the ends of {wide:,} long lines")
    return "\n".join(kept), " and ".join(notes)
