"""Static checks of the Python half of candidates over `load_inline` and `load`: on the syntax tree alone."""

from __future__ import annotations

import ast

from kbrl_async.kernels.backends.checks import syntax
from protocols.records import BuildReport, Fault

_MAX_TEXT = 800
_FORBIDDEN = frozenset(
    [
        *("eval", "exec", "compile", "__import__", "ctypes", "subprocess", "socket", "multiprocessing"),
        *("builtins", "inspect", "gc", *syntax.EVALUATORS),
    ]
)
_FORBIDDEN_ATTRIBUTES = frozenset(
    [
        *syntax.EVALUATORS,
        *("__subclasses__", "__globals__", "__builtins__", "__code__", "__mro__", "__reduce__"),
        *("f_back", "f_locals", "f_globals", "tb_frame", "gi_frame"),
        *("__closure__", "__wrapped__", "__self__", "__func__", "_C", "_python_dispatch"),
    ]
)
_MODULES = frozenset(
    [
        *("torch", "__future__", "abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools"),
        *("hashlib", "itertools", "logging", "math", "numbers", "numpy", "operator", "os", "pathlib", "re", "string"),
        *("sys", "tempfile", "textwrap", "time", "triton", "typing", "uuid", "warnings"),
    ]
)
MAX_UNITS = 32
_OS_ALLOWED = frozenset(("environ", "path", "getenv", "makedirs", "cpu_count", "getcwd", "getpid", "sep"))
RULES = (
    syntax.format_rules(_MODULES, _FORBIDDEN, _FORBIDDEN_ATTRIBUTES)
    + f"Of os only {', '.join(sorted(_OS_ALLOWED))}. Compiler flags may optimise, warn, define macros and choose "
    "floating-point behaviour; the architecture is chosen for you. "
    "Write one Python file that calls load_inline or load; "
    f"an extension has a plain name and up to {MAX_UNITS} sources.\n"
)


def check_names(tree: ast.Module) -> BuildReport | None:
    hint = "A candidate compiles kernels and calls them; it needs no access to the interpreter or the system."
    for node in ast.walk(tree):
        for word in _words(node):
            if word:
                line = getattr(node, "lineno", "?")
                rule = "import" if isinstance(node, (ast.Import, ast.ImportFrom)) else "forbidden_name"
                message = f"line {line}: {word!r} is not allowed"[:_MAX_TEXT]
                return BuildReport(Fault.STATIC_VIOLATION, message=message, hint=hint, rule=rule)
    return None


def _words(node: ast.AST) -> list[str]:
    """What of this node is refused."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if not _is_importable(alias.name)]
    if isinstance(node, ast.ImportFrom):
        module = node.module or "."
        if node.level or not _is_importable(module):
            return [module]
        return [name for alias in node.names if _is_barred(name := f"{module}.{alias.name}")]
    if isinstance(node, ast.Name) and node.id in _FORBIDDEN:
        return [node.id]
    if isinstance(node, ast.Attribute):
        if node.attr in _FORBIDDEN_ATTRIBUTES:
            return [node.attr]
        if isinstance(node.value, ast.Name) and _is_barred(f"{node.value.id}.{node.attr}"):
            return [f"{node.value.id}.{node.attr}"]
    return []


def _is_importable(module: str) -> bool:
    return module.partition(".")[0] in _MODULES and not _is_barred(module)


def _is_barred(name: str) -> bool:
    """What lies in a module that may be imported, by its dotted name."""
    first, *rest = name.split(".")
    is_of_system = first == "os" and bool(rest) and rest[0] not in _OS_ALLOWED
    return is_of_system or name == "sys.modules" or not _FORBIDDEN_ATTRIBUTES.isdisjoint(rest)
