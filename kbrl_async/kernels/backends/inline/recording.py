"""What a candidate would compile: read from its syntax tree where that is certain, else recorded as it runs confined.

::

    source ─▶ read(tree): every call at the top level, of literals and names bound once ─▶ [Extension]
         └─ else `open.recording` (confined child): loaders replaced; import, ModelNew(*init), forward ─▶ [Extension]
"""

from __future__ import annotations

import ast
from typing import Any

from kbrl_async.kernels.backends.inline import launch as inline

LOADERS = ("load_inline", "load")


class _Unreadable(Exception):  # noqa: N818 - control flow of `read` only
    pass


def read(tree: ast.Module) -> list[inline.Extension] | None:
    """The extensions of a candidate, or None where only running it would tell."""
    names = _loader_names(tree)
    top = {
        id(node.value) for node in tree.body if isinstance(node, (ast.Assign, ast.Expr, ast.AnnAssign)) if node.value
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_loader(node.func, names)]
    if not calls or any(id(call) not in top for call in calls):
        return None
    constants = _constants(tree)
    try:
        return [_extension(call, constants) for call in calls]
    except (_Unreadable, TypeError, ValueError, RuntimeError):
        return None


def _loader_names(tree: ast.Module) -> set[str]:
    """Names that `from … import load_inline [as …]` gives the inline loader."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("cpp_extension"):
            names |= {alias.asname or alias.name for alias in node.names if alias.name in LOADERS}
    return names


def _is_loader(function: ast.expr, names: set[str]) -> bool:
    if isinstance(function, ast.Name):
        return function.id in names
    return isinstance(function, ast.Attribute) and (
        function.attr == "load_inline" or (function.attr == "load" and "cpp_extension" in ast.unparse(function.value))
    )


def mentions_loader(tree: ast.Module) -> bool:
    names = _loader_names(tree)
    return bool(names) or any(isinstance(node, ast.Attribute) and _is_loader(node, set()) for node in ast.walk(tree))


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that are bound once in the whole file, by an assignment at its top level."""
    stored: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            stored[node.id] = stored.get(node.id, 0) + 1
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias)):
            bound = node.asname or node.name if isinstance(node, ast.alias) else node.name
            stored[bound] = stored.get(bound, 0) + 2
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if stored[name] == 1:
                found[name] = node.value
    return found


def _extension(call: ast.Call, constants: dict[str, ast.expr]) -> inline.Extension:
    if not (isinstance(call.func, (ast.Name, ast.Attribute)) and ast.unparse(call.func).endswith("load_inline")):
        raise _Unreadable  # `load` reads files
    if any(keyword.arg is None for keyword in call.keywords):
        raise _Unreadable
    args = [_value(arg, constants, 0) for arg in call.args]
    named = {str(keyword.arg): _value(keyword.value, constants, 0) for keyword in call.keywords}
    return inline.inline_extension(*args, **named)


def _value(node: ast.expr, constants: dict[str, ast.expr], depth: int) -> Any:
    if depth > 16:
        raise _Unreadable
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bool, int, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in constants:
        return _value(constants[node.id], constants, depth + 1)
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_value(item, constants, depth + 1) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [_value(key, constants, depth + 1) for key in node.keys if key is not None]
        return dict(zip(keys, [_value(item, constants, depth + 1) for item in node.values], strict=True))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, constants, depth + 1), _value(node.right, constants, depth + 1)
        if isinstance(left, str) and isinstance(right, str):
            return left + right
    raise _Unreadable
