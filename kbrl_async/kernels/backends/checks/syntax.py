"""The first look at the Python half of a candidate, the same for every backend."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from protocols.records import BuildReport, Fault

EVALUATORS = (
    *("get_type_hints", "ForwardRef", "_eval_type", "_evaluate", "evaluate_forward_ref", "evaluate_value"),
    *("get_annotations", "singledispatch", "singledispatchmethod", "__annotations__", "_create_fn", "bltns"),
)
"""Names in modules that a candidate may import which turn text into code: no static check reads annotations."""


def format_rules(imports: Iterable[str], names: Iterable[str], attributes: Iterable[str]) -> str:
    """The rules of `strict` for the Python half in words, for a model: what is refused is what it was told."""
    everywhere = set(names)
    only = sorted(set(attributes) - everywhere)
    return (
        f"Import nothing but {', '.join(sorted(imports))}. Refused wherever they stand in the Python code: "
        f"{', '.join(sorted(everywhere))}; and as attributes: {', '.join(only)}.\n"
    )


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


def model_fault(nodes: Iterable[ast.AST]) -> BuildReport | None:
    """Why `nodes` give no `ModelNew`; None where they do: by `class`, or by `ModelNew = Other`."""
    bound: dict[str, ast.AST] = {}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            bound[node.name] = node
        elif isinstance(node, ast.Assign):
            bound.update({target.id: node.value for target in node.targets if isinstance(target, ast.Name)})
    found = bound.get("ModelNew")
    while isinstance(found, ast.Name):
        found = bound.pop(found.id, None)  # taken out, so that names of one another end
    if not isinstance(found, ast.ClassDef):
        hint = "Define `class ModelNew(nn.Module)`, or `ModelNew = Other` below a class Other of this file."
        return _format_error("no_model", "the file defines no class ModelNew", hint)
    if _has_forward(found, bound):
        return None
    hint = f"Define `def forward(self, …)` in {found.name}, a subclass of nn.Module."
    return _format_error("no_forward", f"line {found.lineno}: {found.name} has no forward", hint)


def _has_forward(model: ast.ClassDef, bound: dict[str, ast.AST]) -> bool:
    """Its own, or that of a base in the same file."""
    if any(isinstance(item, ast.FunctionDef) and item.name == "forward" for item in model.body):
        return True
    bases = [bound.pop(base.id, None) for base in model.bases if isinstance(base, ast.Name)]
    return any(isinstance(base, ast.ClassDef) and _has_forward(base, bound) for base in bases)


def _format_error(rule: str, message: str, hint: str) -> BuildReport:
    return BuildReport(Fault.FORMAT_ERROR, message=message, hint=hint, rule=rule)
