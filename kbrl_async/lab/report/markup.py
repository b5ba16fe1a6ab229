"""HTML that is safe by construction: text is escaped unless this module made it.

Invariants
* A `Markup` is made by `element`, or of constants of this project or another library's escaped output.
* What a candidate wrote can't leave its element, can't hide itself (control and bidirectional characters are shown as
  what they are), and can't make a line or a text longer than asked for.

::

    element("p", "a < b", class_="note")  ─▶  <p class="note">a &lt; b</p>
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup as Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer, PythonLexer, YamlLexer

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_VOID = frozenset({"br", "hr", "input", "meta", "link", "img"})


Content = str | int | float | None


def visible(text: str) -> str:
    """The text with every character that a browser would hide, or that would reorder others, spelled out."""
    return _SURROGATES.sub("\ufffd", _HIDDEN.sub(_picture, text.replace("\r\n", "\n")))


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def escape(content: Content) -> Markup:
    """The content as HTML text; `Markup` stays as it is, None is nothing."""
    return content if isinstance(content, Markup) else Markup.escape("" if content is None else visible(str(content)))


def element(name: str, /, *children: Content, **attributes: Content | bool) -> Markup:
    """One element. `class_` is `class`, other underscores are hyphens; an attribute of None or False is left out."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    inside = join(children)
    made = f"<{name}{shown}>" if name in _VOID else f"<{name}{shown}>{inside}</{name}>"
    return Markup(made)  # noqa: S704 - all that is in it was escaped


def _attribute(key: str, value: Content | bool) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(value)}"'


def join(parts: Iterable[Content]) -> Markup:
    return Markup().join(map(escape, parts))


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


# ── source code with its syntax in colour, however hostile the source ────────────────────────────────────────────────


LEXERS = {"python": PythonLexer, "c": CLexer, "yaml": YamlLexer}
_KERNEL = re.compile(r'(r?""")([^"]*;[^"]*)(""")')
"""A string in triple quotes with a semicolon in it: C, CUDA or C++."""
MOST_COLOURED = 24_000
"""Longer texts stay plain: a million characters of brackets must not cost seconds or a million elements."""
MOST_LINES, MOST_COLUMNS = 320, 200


def source(text: str, language: str = "python") -> Markup:
    """A `pre` block of the text, its odd characters visible, its length bounded; what was left out is said below."""
    if not text.strip():
        return element("p", element("small", "not kept by this run"))
    kept, left_out = clipped(visible(text), lines=MOST_LINES, columns=MOST_COLUMNS)
    code = _coloured(kept, language) if len(kept) <= MOST_COLOURED else escape(kept)
    note = element("small", f"Left out: {left_out}; {len(text):,} characters in all.") if left_out else ""
    return element("pre", code) + note


def _coloured(text: str, language: str) -> Markup:
    """A kernel in a string of a Python file is coloured as what it is."""
    if language != "python":
        return _lexed(text, language)
    parts = _KERNEL.split(text)
    shown = []
    for around, quotes, kernel in zip(parts[::4], [*parts[1::4], ""], [*parts[2::4], ""], strict=True):
        shown += [_lexed(around, "python"), element("span", quotes, class_="y-s")]
        shown += [_lexed(kernel, "c"), element("span", quotes[-3:], class_="y-s")]
    return join(shown)


def _lexed(text: str, language: str) -> Markup:
    # pygments escapes what it is given, and ends it with a line; the prefix keeps its classes from those of charts
    lexer = LEXERS[language](stripnl=False, ensurenl=False)
    shown = highlight(text, lexer, HtmlFormatter(nowrap=True, classprefix="y-"))
    return Markup(shown if text.endswith("\n") else shown.removesuffix("\n"))  # noqa: S704 - pygments
