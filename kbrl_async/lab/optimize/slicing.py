"""The part of a module's text that one of its names needs, so that it can stand alone in a sandbox. Never imports it.

slice_of(text, ["my_function"])  ─▶  its imports, constants, helpers and itself, in their order
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

import msgspec

from kbrl_async.errors import UserError


class Slice(msgspec.Struct, frozen=True):
    """`parts`: statements in their order, each as it stands in the file."""

    parts: tuple[str, ...]
    missing: tuple[str, ...]
    """Wanted names that the module does not bind."""


def slice_of(text: str, wanted: Sequence[str], origin: str) -> Slice:
    """:raises UserError: the file does not parse, or needs a neighbour that can't go along."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{origin}:{error.lineno} does not parse: {error.msg}", "Mend the file") from None
    binders: dict[str, list[int]] = {}
    for place, node in enumerate(tree.body):
        for name in _bound(node):
            binders.setdefault(name, []).append(place)
    kept = _needed(tree, binders, wanted)
    for place in sorted(kept):
        _refuse_neighbours(tree.body[place], origin)
    parts = tuple(_text(text, tree.body[place]) for place in sorted(kept))
    return Slice(parts, tuple(name for name in wanted if name not in binders))


def definition(text: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The last definition of a function or class of that name at the module's top."""
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    return nodes[-1] if nodes else None


def joined(slices: Iterable[Slice], head: str) -> str:
    """`head` and their parts, each once, with imports of the future before all."""
    parts = list(dict.fromkeys(part for piece in slices for part in piece.parts))
    future = [part for part in parts if part.startswith("from __future__")]
    return "\n".join([*future, head, *(part for part in parts if part not in future)]) + "\n"


def _needed(tree: ast.Module, binders: dict[str, list[int]], wanted: Sequence[str]) -> set[int]:
    kept = {i for i, n in enumerate(tree.body) if isinstance(n, ast.ImportFrom) and n.module == "__future__"}
    todo = list(wanted)
    while todo:
        for place in binders.get(todo.pop(), []):
            if place not in kept:
                kept.add(place)
                todo += [n.id for n in ast.walk(tree.body[place]) if isinstance(n, ast.Name)]
    return kept


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _refuse_neighbours(node: ast.stmt, origin: str) -> None:
    if isinstance(node, ast.ImportFrom) and node.level:
        cause = f"{origin}:{node.lineno} imports a neighbour: {ast.unparse(node)}"
        raise UserError(cause, "Only the file itself goes into the sandbox: put what it needs into it")


def _text(text: str, node: ast.stmt) -> str:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
