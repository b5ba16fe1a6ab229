"""From text to a candidate: a Python file is taken as it stands, a model's response goes through extraction first.

The backend is guessed from what the file imports and calls; only its text is looked at.
"""

from __future__ import annotations

import ast
import re

import msgspec

from kbrl_async.kernels.answers.extraction import extract
from kbrl_async.kernels.backends import guess_backend
from protocols.records import Candidate

_LOOKS_LIKE_A_RESPONSE = re.compile(r"^[ \t]*```|<KERNEL>|</think>", re.MULTILINE)


class Reading(msgspec.Struct, frozen=True):
    """A candidate, or in `problem` why there is none."""

    candidate: Candidate | None = None
    problem: str = ""
    origin: str = ""
    """`"file"` or `"response"`."""


def read_candidate(text: str, backend: str | None = None, *, response: bool | None = None) -> Reading:
    """`response` None: a text that parses as Python is a file; fences, `<KERNEL>` or `</think>` make it a response."""
    if response is None:
        response = not _parses(text) and bool(_LOOKS_LIKE_A_RESPONSE.search(text))
    origin = "response" if response else "file"
    if not text.strip():
        return Reading(problem="the candidate is empty", origin=origin)
    source = text
    if response:
        found = extract(text)
        if found.problem:
            return Reading(problem=found.problem, origin=origin)
        source = found.source
    return Reading(Candidate(source, backend or guess_backend(source)), origin=origin)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
