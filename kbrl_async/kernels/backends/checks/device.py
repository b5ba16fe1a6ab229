"""Static checks of the Python half of candidates for the GPU (`triton`, `cuda-nvrtc`), on the syntax tree alone.

Wider than the checks of backend `c`: streams, graphs, `torch.cuda`, autotuning and library calls for a sub-step are
legitimate here, and what a candidate really computes is proven at the bench. What is refused is what no kernel needs.
"""

from __future__ import annotations

import ast

from kbrl_async.kernels.backends.checks import syntax
from protocols.records import BuildReport, Fault

_PURE: tuple[str, ...] = (
    "__future__",
    "abc",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
)
_PURE += ("math", "numbers", "operator", "typing", "warnings")
_ROOTS = frozenset(["torch", "triton", "numpy", *_PURE])
_REFUSED_MODULES = ("torch.utils.cpp_extension", "torch.multiprocessing", "torch.distributed", "torch.hub")
_REFUSED_NAMES = frozenset(
    [
        *("eval", "exec", "compile", "open", "__import__", "globals", "breakpoint", "ctypes"),
        *("subprocess", "socket", "importlib", "builtins", "inspect", "gc", "__builtins__", "__loader__"),
        *syntax.EVALUATORS,
    ]
)
_REFUSED_ATTRIBUTES = frozenset(
    [
        *("__subclasses__", "__globals__", "__builtins__", "__code__", "__mro__", "__reduce__"),
        *("__getattribute__", "_C", "hub", "f_back", "f_locals", "f_globals", "tb_frame", "gi_frame"),
        *("cr_frame",),
        *syntax.EVALUATORS,
    ]
)


RULES = syntax.format_rules({*_ROOTS, "kbrl_async.launch"}, _REFUSED_NAMES, _REFUSED_ATTRIBUTES) + (
    f"Not {', '.join(_REFUSED_MODULES)} either.\n"
)


class CheckFailed(Exception):  # noqa: N818 - control flow of the checks only
    """What is wrong, as a report."""

    def __init__(
        self,
        rule: str,
        message: str,
        hint: str,
        node: ast.AST | None = None,
        fault: Fault = Fault.STATIC_VIOLATION,
    ) -> None:
        line = getattr(node, "lineno", None)
        text = f"line {line}: {message}" if line else message
        self.report = BuildReport(fault, message=text[:800], hint=hint, rule=rule)
        super().__init__(text)


def checked_tree(source: str) -> ast.Module:
    """The syntax tree of a candidate that defines `ModelNew` and holds the common rules. Raises `CheckFailed`."""
    tree = syntax.parsed(source)
    if isinstance(tree, BuildReport):
        raise CheckFailed(tree.rule, tree.message, tree.hint, fault=tree.fault)
    if report := syntax.model_fault(ast.walk(tree)):
        raise CheckFailed(report.rule, report.message, report.hint, fault=report.fault)
    for node in ast.walk(tree):
        _check_import(node)
        _check_name(node)
    return tree


def _check_import(node: ast.AST) -> None:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names = [f"{module}.{alias.name}" for alias in node.names] if node.level == 0 else ["." + module]
    else:
        return
    for name in names:
        is_ours = name == "kbrl_async.launch" or name.startswith("kbrl_async.launch.")
        is_known = name.partition(".")[0] in _ROOTS and not name.startswith(_REFUSED_MODULES)
        if not is_ours and not is_known:
            hint = "Import torch, triton, numpy, kbrl_async.launch and plain modules as math or functools."
            raise CheckFailed("import", f"import of {name!r} is not allowed", hint, node)


def _check_name(node: ast.AST) -> None:
    hint = "A candidate defines kernels and launches them; it needs no access to the interpreter or the system."
    if isinstance(node, ast.Name) and node.id in _REFUSED_NAMES:
        raise CheckFailed("forbidden_name", f"{node.id!r} is not allowed", hint, node)
    if isinstance(node, ast.Attribute) and node.attr in _REFUSED_ATTRIBUTES:
        raise CheckFailed("forbidden_name", f"attribute {node.attr!r} is not allowed", hint, node)


def string_constants(tree: ast.Module) -> dict[str, str]:
    """Module-level names that are bound to one string literal."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""
