"""In which languages an author can answer. To add one: a function from spec and author to a response, a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kbrl_async.errors import ConfigError
from kbrl_async.lab.small_policy import cuda
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.source import Family, render_answer


def _in_c(spec: Family, author: Author) -> str:
    return render_answer(spec.module(), spec.answer(author), author)


LANGUAGES: Mapping[str, Callable[[Family, Author], str]] = {"c": _in_c, "cuda-nvrtc": cuda.respond}
"""By backend."""


def respond(spec: Family, author: Author, backend: str) -> str:
    """The author's response to the problem of `spec`, a fenced file with slips and all."""
    try:
        return LANGUAGES[backend](spec, author)
    except KeyError:
        known = ", ".join(LANGUAGES)
        raise ConfigError(f"the small policy can't be taught backend={backend}", f"It learns {known}") from None
