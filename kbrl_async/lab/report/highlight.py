"""Source code with its syntax in colour, however hostile the source."""

from __future__ import annotations

import re

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer, PythonLexer, YamlLexer

from kbrl_async.lab.report.markup import Markup, clipped, element, escape, join, visible

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
    return element("pre", code) + escape(note)


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
    # pygments escapes its input, and ends it with a line; the prefix keeps its classes apart from those of charts
    lexer = LEXERS[language](stripnl=False, ensurenl=False)
    shown = highlight(text, lexer, HtmlFormatter(nowrap=True, classprefix="y-"))
    return Markup(shown if text.endswith("\n") else shown.removesuffix("\n"))
