"""What the Python half of a candidate may contain, checked on its syntax tree.

Only what no honest kernel needs is refused here: ways out of the sandbox, into the runner, or into another compiler.
Whether the own kernels do the work is nothing that a text can show (an alias, a helper, a parameter hides any call):
the bench finds that out by running it (`kbrl_async.kernels.verify.proof`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from kbrl_async.kernels.backends.checks import syntax
from kbrl_async.kernels.backends.checks.constants import LOOPS, Constants
from protocols.records import BuildReport, Fault

_LAUNCHER = "kbrl_async.launch"
_IMPORTS = frozenset(
    [
        *("torch", "torch.nn", "torch.nn.functional", "math", _LAUNCHER, "__future__", "typing", "functools"),
        *("itertools", "dataclasses", "collections", "collections.abc", "textwrap", "enum", "abc"),
    ]
)
_LAUNCHERS = frozenset({"c_kernel"})
_FORBIDDEN_NAMES = frozenset(
    [
        *("eval", "exec", "compile", "open", "__import__", "getattr", "setattr", "delattr", "globals"),
        *("locals", "vars", "breakpoint", "ctypes", "os", "sys", "subprocess", "socket"),
        *("threading", "multiprocessing", "importlib", "builtins", "inspect", "gc", "signal", "__builtins__"),
        *("__loader__",),
        *syntax.EVALUATORS,
    ]
)
_FORBIDDEN_ATTRIBUTES = frozenset(
    [
        *("__closure__", "__self__", "__func__", "__wrapped__", "__import__", "f_globals", "f_locals"),
        *("f_back", "gi_frame", "tb_frame", "_sys", "_os", "sys", "os", "ctypes", "builtins", "importlib"),
        *("inspect", "gc", "numpy", "from_numpy", "tolist", "proof", "RECORDER", "__class__", "__bases__"),
        *("__subclasses__", "__globals__", "__builtins__", "__dict__", "__code__", "__mro__", "__reduce__"),
        *("__getattribute__", "compile", "jit", "ops", "_C", "utils", "load", "save", "hub"),
        *("multiprocessing", "set_num_threads", "overrides", "library"),
        *syntax.EVALUATORS,
    ]
)


RULES = syntax.format_rules(_IMPORTS, _FORBIDDEN_NAMES, _FORBIDDEN_ATTRIBUTES)


class PythonHalf(msgspec.Struct, frozen=True):
    """The parsed Python half."""

    tree: ast.Module
    kernels: list[tuple[str, str]]
    """(C source, function name) of every `c_kernel` call; the name is empty where only a run would tell it."""


class _Violation(Exception):  # noqa: N818 - control flow inside this module only
    def __init__(self, rule: str, message: str, hint: str, node: ast.AST | None = None) -> None:
        line = getattr(node, "lineno", None)
        self.rule, self.hint = rule, hint
        self.message = f"line {line}: {message}" if line else message
        super().__init__(message)


def parse(source: str) -> PythonHalf | BuildReport:
    """The program, or the report that says what is wrong with it."""
    tree = syntax.parsed(source)
    if isinstance(tree, BuildReport):
        return tree
    if report := syntax.model_fault(tree.body):
        return report
    try:
        return _check(tree)
    except _Violation as violation:
        message, fault = violation.message[:800], Fault.STATIC_VIOLATION
        return BuildReport(fault, message=message, hint=violation.hint, rule=violation.rule)


def _check(tree: ast.Module) -> PythonHalf:
    _imports(tree)
    _names(tree)
    return PythonHalf(tree, _kernels(tree))


def _imports(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules, names = [alias.name for alias in node.names], []
        elif isinstance(node, ast.ImportFrom):
            # `from torch import nn` names a module of the list.
            modules, names = ["." * node.level + (node.module or "")], [alias.name for alias in node.names]
        else:
            continue
        for name in modules:
            if name not in _IMPORTS or (name == _LAUNCHER and isinstance(node, ast.Import)):
                allowed = ", ".join(sorted(_IMPORTS - {_LAUNCHER, "__future__"}))
                hint = f"Only these may be imported: {allowed}; and `from kbrl_async.launch import c_kernel`."
                raise _Violation("import", f"import of {name!r} is not allowed", hint, node)
        for name in names:
            if name in _FORBIDDEN_NAMES | _FORBIDDEN_ATTRIBUTES or (_LAUNCHER in modules and name not in _LAUNCHERS):
                hint = "Import what computes or describes, and c_kernel."
                raise _Violation("import", f"import of {name!r} from {modules[0]!r} is not allowed", hint, node)


def _names(tree: ast.Module) -> None:
    hint = "Use only torch allocation and views, and c_kernel."
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES:
            raise _Violation("forbidden_name", f"{node.id!r} is not allowed", hint, node)
        if isinstance(node, ast.Attribute) and node.attr in _FORBIDDEN_ATTRIBUTES:
            raise _Violation("forbidden_name", f"attribute {node.attr!r} is not allowed", hint, node)


def _kernels(tree: ast.Module) -> list[tuple[str, str]]:
    constants = Constants(tree)
    found: list[tuple[str, str]] = []
    for node, around in _with_surroundings(tree, ()):
        if isinstance(node, ast.Call) and _called(node) == "c_kernel":
            found.extend(_kernel(node, around, constants))
    if not found:
        hint = 'Launch a C function: `self.kernel = c_kernel(SOURCE, "name")` in __init__, `self.kernel(…)` in forward.'
        raise _Violation("no_kernel", "the candidate has no c_kernel(source, name)", hint)
    return list(dict.fromkeys(found))


def _with_surroundings(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Every node with the classes, functions and loops that it stands in."""
    inner = (*around, node) if isinstance(node, (ast.ClassDef, ast.FunctionDef, *LOOPS)) else around
    for child in ast.iter_child_nodes(node):
        yield child, inner
        yield from _with_surroundings(child, inner)


def _kernel(node: ast.Call, around: tuple[ast.AST, ...], constants: Constants) -> list[tuple[str, str]]:
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    given = [*node.args, *(named[key] for key in ("source", "name")[len(node.args) :] if key in named)]
    hint = 'Write c_kernel(SOURCE, "name"), where SOURCE is a string that can be known without running the file.'
    if len(given) != 2:
        raise _Violation("kernel_source", "c_kernel takes a source and a name", hint, node)
    pairs = constants.texts((given[0], given[1]), around)
    if any(source is None for source, _ in pairs) or not pairs:
        raise _Violation("kernel_source", "the source of this c_kernel is no constant", hint, node)
    return [(str(source), name or "") for source, name in pairs]


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
