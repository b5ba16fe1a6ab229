"""The first look at the Python half of a candidate, the same for every backend."""

from __future__ import annotations

import ast

from protocols.records import BuildReport, Fault


def parsed(source: str) -> ast.Module | BuildReport:
    """The syntax tree, or the report that says why there is none."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        message = f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)
        hint = "The candidate must be one valid Python file."
        text = f"Python syntax error: {message}"[:800]
        return BuildReport(Fault.FORMAT_ERROR, message=text, hint=hint, rule="syntax")
