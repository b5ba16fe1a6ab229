"""The normal form of a reference: a flat list of tokens in which names and constants are hidden.

`nn.Linear(64, hidden, bias=False)` → `call torch.nn.Linear K v keyword bias K`. Local names are numbered by their first
use in the form that is hashed (so the same code under other names has the same hash), and are all `v` in the form that
is counted (so the order of statements moves little).
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from kbrl_async.kernels.syntax.scope import Scope, is_super_init, without_docstring

CONSTANT, LOCAL = "K", "v"
MAX_TOKENS = 60_000
_BUILTINS = frozenset(dir(builtins))
_DROPPED = {"annotation", "returns", "type_comment", "ctx", "type_ignores", "type_params", "kind"}


class Normal:
    """Tokens of one source; `numbered` holds the number of each local name where the token is `LOCAL`, else 0."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._numbers: dict[str, int] = {}
        self.tokens: list[str] = []
        self.numbered: list[int] = []
        self.bigrams: list[str] = []
        """Parent and child of every edge of the tree, by node type."""
        for node in scope.definitions.values():
            self._emit(node)

    def _put(self, token: str, number: int = 0) -> None:
        self.tokens.append(token)
        self.numbered.append(number)

    def _local(self, name: str) -> None:
        self._put(LOCAL, self._numbers.setdefault(name, len(self._numbers) + 1))

    def _emit(self, node: ast.AST) -> None:
        if len(self.tokens) > MAX_TOKENS:
            return
        match node:
            case ast.Constant() | ast.JoinedStr():
                self._put(CONSTANT)
            case ast.UnaryOp(operand=ast.Constant()):
                self._put(CONSTANT)
            case ast.Name(id=name):
                self._name(node, name)
            case ast.Attribute():
                self._attribute(node)
            case ast.arg(arg=name):
                self._local(name)
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                self._definition(node)
            case _:
                self._generic(node)

    def _name(self, node: ast.Name, name: str) -> None:
        if qualified := self._scope.qualified(node):
            self._put(qualified)
        elif name in _BUILTINS and name not in self._numbers and name not in self._scope.definitions:
            self._put(name)
        else:
            self._local(name)

    def _attribute(self, node: ast.Attribute) -> None:
        if qualified := self._scope.qualified(node):
            self._put(qualified)
            return
        self._put("Attribute")
        self._emit(node.value)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            # members are named by the author; torch's own API is met on tensors
            self._local("self." + node.attr)
        else:
            self._put(node.attr)

    def _definition(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        body = [child for child in without_docstring(node.body) if not is_super_init(child)]
        body = [child for child in body if not _is_empty_constructor(child)]
        self._put(type(node).__name__)
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                self._emit(base)
        else:
            if node.name.startswith("__") or node.name == "forward":
                self._put(node.name)
            self._emit(node.args)
        for child in body:
            self._emit(child)
        self._put("end")

    def _generic(self, node: ast.AST) -> None:
        name = type(node).__name__
        self._put(name)
        for child in _children(node):
            self.bigrams.append(f"{name}>{type(child).__name__}")
            self._emit(child)
        if isinstance(node, ast.keyword) and node.arg:
            self._put(node.arg)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field in _DROPPED:
            continue
        if isinstance(value, ast.AST):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, ast.AST))


def _is_empty_constructor(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.name == "__init__"
        and all(is_super_init(child) for child in without_docstring(node.body))
    )
