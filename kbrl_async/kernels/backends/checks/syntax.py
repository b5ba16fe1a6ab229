"""The first look at the Python half of a candidate, the same for every backend."""

from __future__ import annotations

import ast

from protocols.records import BuildReport, Fault

EVALUATORS = (
    *("get_type_hints", "ForwardRef", "_eval_type", "_evaluate", "evaluate_forward_ref", "evaluate_value"),
    *("get_annotations", "singledispatch", "singledispatchmethod", "__annotations__", "_create_fn", "bltns"),
)
"""Names in modules that a candidate may import which turn text into code: an annotation is text that no tripwire reads.
"""


def parsed(source: str) -> ast.Module | BuildReport:
    """The syntax tree, or the report that says why there is none."""
    try:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value.encode()  # half of a pair of surrogates is in no file that a compiler reads
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        message = f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)
        hint = "The candidate must be one valid Python file."
        text = f"Python syntax error: {message}"[:800]
        return BuildReport(Fault.FORMAT_ERROR, message=text, hint=hint, rule="syntax")
