"""Values of a candidate's constant expressions, computed on its syntax tree: nothing of the candidate is executed.

Kernel sources are built in many honest ways: f-strings, `+`, `%`, `.format`, `.replace`, `.join` over a comprehension,
`textwrap.dedent`, repetition, class attributes, small functions of constants. All of them are constants, as long as
nothing depends on what only the running candidate knows.

Invariants
* Work and size are bounded: `_MAX_STEPS` nodes and `_MAX_TEXT` characters, whatever the expression says.
* The value is the one Python would compute, or `NotConstant` is raised; never a guess.
"""

from __future__ import annotations

import ast
import operator
import string
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_MAX_TEXT = 1 << 20
_MAX_STEPS = 20_000
_MAX_DEPTH = 24
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.LShift: operator.lshift,
}
_CONVERSIONS: dict[int, Callable[[Any], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}
_TEXT_METHODS = frozenset(
    [
        *("format", "join", "replace", "strip", "lstrip", "rstrip", "upper", "lower", "title"),
        *("removeprefix", "removesuffix", "splitlines", "split"),
    ]
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "len": len,
    "range": lambda *limits: list(_short_range(*limits)),
    "max": max,
    "min": min,
    "list": list,
    "tuple": tuple,
    "sorted": sorted,
    "dedent": textwrap.dedent,
    "indent": textwrap.indent,
}
_SCALARS = (str, int, float, bool, type(None))


_UNKNOWN = object()
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
LOOPS = (ast.For, *_COMPREHENSIONS)


class NotConstant(Exception):  # noqa: N818 - an answer, not an error
    """The expression depends on something that only a run would tell."""


_FAILURES = (NotConstant, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError)


def _short_range(*limits: int) -> range:
    made = range(*limits)
    if len(made) > _MAX_STEPS:
        raise NotConstant
    return made


class Constants:
    """The constants of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self._assigned = _once(_assignments(tree.body))
        self._functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._classes = {
            node.name: _once(_assignments(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)
        }
        self._steps = 0

    def texts(self, nodes: tuple[ast.AST, ...], around: tuple[ast.AST, ...]) -> list[tuple[str | None, ...]]:
        """The strings that expressions are, None for what is no constant string; once for each turn of the constant
        loops among `around`, the classes, functions and loops that they stand in, outermost first.
        """
        self._steps = 0
        return [tuple(self._text(node, local) for node in nodes) for local in self._locals(around)]

    def _text(self, node: ast.AST, local: dict[str, Any]) -> str | None:
        try:
            value = self._value(node, local, 0)
        except _FAILURES:
            return None
        return value if isinstance(value, str) else None

    def _locals(self, around: tuple[ast.AST, ...]) -> list[dict[str, Any]]:
        scopes: list[dict[str, Any]] = [{"": ""}]
        for node in around:
            if isinstance(node, ast.ClassDef):
                scopes = [{"": node.name}]
            elif isinstance(node, ast.FunctionDef):
                own = _names(_once(_assignments(node.body)), self, 0)
                hidden = {argument.arg: _UNKNOWN for argument in (*node.args.args, *node.args.kwonlyargs)}
                scopes = [{**scope, **own, **hidden} for scope in scopes]
            else:
                scopes = [turn for scope in scopes for turn in self._turns(node, scope)]
        return scopes

    def _turns(self, loop: ast.AST, scope: dict[str, Any]) -> list[dict[str, Any]]:
        """One scope for each turn of a loop over constants; the loop's names are unknown where it is none."""
        parts: list[Any] = list(loop.generators) if isinstance(loop, _COMPREHENSIONS) else [loop]
        target, over = getattr(parts[0], "target", None), getattr(parts[0], "iter", None)
        names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name)] if target is not None else []
        try:
            if len(parts) != 1 or over is None:
                raise NotConstant
            items = [item if isinstance(target, ast.Tuple) else (item,) for item in self._value(over, scope, 0)]
            return [{**scope, **dict(zip(names, item, strict=True))} for item in items]
        except _FAILURES:
            return [{**scope, **dict.fromkeys(names, _UNKNOWN)}]

    def _value(self, node: ast.AST, local: dict[str, Any], depth: int) -> Any:
        self._steps += 1
        if self._steps > _MAX_STEPS or depth > _MAX_DEPTH:
            raise NotConstant
        visit = getattr(self, f"_{type(node).__name__}", None)
        if visit is None:
            raise NotConstant
        return _bounded(visit(node, local, depth + 1))

    def _Constant(self, node: ast.Constant, local: dict[str, Any], depth: int) -> Any:  # noqa: N802 - ast's names
        if not isinstance(node.value, _SCALARS):
            raise NotConstant
        return node.value

    def _Name(self, node: ast.Name, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        if node.id in local:
            if local[node.id] is _UNKNOWN:
                raise NotConstant
            return local[node.id]
        return self._value(self._assigned[node.id], {"": ""}, depth)

    def _Attribute(self, node: ast.Attribute, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        if not isinstance(node.value, ast.Name):
            raise NotConstant
        owner = local[""] if node.value.id in ("self", "cls") else node.value.id
        return self._value(
            self._classes[owner][node.attr], {"": owner, **_names(self._classes[owner], self, depth)}, depth
        )

    def _JoinedStr(self, node: ast.JoinedStr, local: dict[str, Any], depth: int) -> str:  # noqa: N802
        return "".join(str(self._value(part, local, depth)) for part in node.values)

    def _FormattedValue(self, node: ast.FormattedValue, local: dict[str, Any], depth: int) -> str:  # noqa: N802
        value = self._value(node.value, local, depth)
        if node.conversion > 0:
            value = _CONVERSIONS[node.conversion](value)
        spec = self._value(node.format_spec, local, depth) if node.format_spec is not None else ""
        return _formatted(value, spec)

    def _BinOp(self, node: ast.BinOp, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        left, right = self._value(node.left, local, depth), self._value(node.right, local, depth)
        if isinstance(node.op, (ast.Mult, ast.LShift)):
            _refuse_growth(left, right)
        if isinstance(node.op, ast.Mod) and isinstance(left, str) and "*" in left:
            raise NotConstant  # a width from the arguments can be of any size
        return _BINARY[type(node.op)](left, right)

    def _UnaryOp(self, node: ast.UnaryOp, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        if not isinstance(node.op, ast.USub):
            raise NotConstant
        return -self._value(node.operand, local, depth)

    def _Tuple(self, node: ast.Tuple, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        return tuple(self._value(item, local, depth) for item in node.elts)

    def _List(self, node: ast.List, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        return [self._value(item, local, depth) for item in node.elts]

    def _Dict(self, node: ast.Dict, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        if None in node.keys:
            raise NotConstant
        pairs = zip(node.keys, node.values, strict=True)
        return {self._value(key, local, depth): self._value(item, local, depth) for key, item in pairs if key}

    def _Subscript(self, node: ast.Subscript, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        return self._value(node.value, local, depth)[self._value(node.slice, local, depth)]

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        if len(node.generators) != 1 or not isinstance(node.generators[0].target, ast.Name) or node.generators[0].ifs:
            raise NotConstant
        loop = node.generators[0]
        assert isinstance(loop.target, ast.Name)
        items = self._value(loop.iter, local, depth)
        return [self._value(node.elt, {**local, loop.target.id: item}, depth) for item in items]

    _GeneratorExp = _ListComp

    def _Call(self, node: ast.Call, local: dict[str, Any], depth: int) -> Any:  # noqa: N802
        if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
            raise NotConstant
        given = [self._value(argument, local, depth) for argument in node.args]
        named = {str(k.arg): self._value(k.value, local, depth) for k in node.keywords}
        if isinstance(node.func, ast.Name):
            if node.func.id in self._functions:
                return self._called(self._functions[node.func.id], given, named, depth)
            if node.func.id in self._assigned or node.func.id in local:
                raise NotConstant
            return _FUNCTIONS[node.func.id](*given, **named)
        if not isinstance(node.func, ast.Attribute):
            raise NotConstant
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "textwrap":
            return _FUNCTIONS[node.func.attr](*given, **named)
        text = self._value(node.func.value, local, depth)
        if not isinstance(text, str) or node.func.attr not in _TEXT_METHODS:
            raise NotConstant
        return _method(text, node.func.attr, given, named)

    def _called(self, function: ast.FunctionDef, given: list[Any], named: dict[str, Any], depth: int) -> Any:
        """A function of one `return`, after its docstring."""
        body = [
            item for item in function.body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
        ]
        if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None or function.args.vararg:
            raise NotConstant
        arguments = function.args.args
        defaults = function.args.defaults
        late = {a.arg: d for a, d in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)}
        local: dict[str, Any] = {"": ""}
        for place, argument in enumerate(arguments):
            if place < len(given):
                local[argument.arg] = given[place]
            elif argument.arg in named:
                local[argument.arg] = named[argument.arg]
            else:
                local[argument.arg] = self._value(late[argument.arg], {"": ""}, depth)
        return self._value(body[0].value, local, depth)


def _names(assigned: dict[str, ast.AST], constants: Constants, depth: int) -> dict[str, Any]:
    """What a class body's own names are, as far as they are constant: they may use one another."""
    found: dict[str, Any] = {}
    for name, node in assigned.items():
        try:
            found[name] = constants._value(node, {"": "", **found}, depth)
        except _FAILURES:
            continue
    return found


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _bound(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, (ast.For, ast.If, ast.Try, ast.With, ast.While)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id, inner


def _bound(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    """`a = x`, and `a, b = x, y` where both sides are written out."""
    if isinstance(target, ast.Name):
        yield target.id, value
        return
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(parts):
        for part, item in zip(parts, value.elts, strict=True):
            yield from _bound(part, item)
    else:
        yield from ((inner.id, inner) for inner in ast.walk(target) if isinstance(inner, ast.Name))


def _once(pairs: Iterator[tuple[str, ast.AST]]) -> dict[str, ast.AST]:
    """Names that are bound exactly once: what is bound again is no constant."""
    found: dict[str, ast.AST] = {}
    seen: set[str] = set()
    for name, node in pairs:
        if name in seen:
            found.pop(name, None)
        elif not isinstance(node, (ast.AugAssign, ast.Name)) or isinstance(getattr(node, "ctx", None), ast.Load):
            found[name] = node
        seen.add(name)
    return found


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple, dict)) and len(value) > _MAX_TEXT:
        raise NotConstant
    return value


def _refuse_growth(left: Any, right: Any) -> None:
    for text, count in ((left, right), (right, left)):
        if isinstance(text, (str, list, tuple)) and isinstance(count, int) and len(text) * count > _MAX_TEXT:
            raise NotConstant
    if all(isinstance(side, int) for side in (left, right)) and max(abs(left), abs(right)) > 1 << 40:
        raise NotConstant


def _formatted(value: Any, spec: str) -> str:
    if not isinstance(value, _SCALARS) or len(spec) > 12 or any(len(run) > 4 for run in _digits(spec)):
        raise NotConstant
    return format(value, spec)


def _digits(spec: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in spec).split()


def _method(text: str, name: str, given: list[Any], named: dict[str, Any]) -> Any:
    if name == "format":
        # Fields may reach into attributes and ask for any width: only plain fields of scalars are taken.
        is_scalar = all(isinstance(value, _SCALARS) for value in (*given, *named.values()))
        if not is_scalar or not _plain_fields(text):
            raise NotConstant
    if name == "join" and sum(len(item) for item in given[0]) + len(text) * len(given[0]) > _MAX_TEXT:
        raise NotConstant
    if name == "replace" and len(given) >= 2 and text.count(given[0]) * len(given[1]) + len(text) > _MAX_TEXT:
        raise NotConstant
    return getattr(text, name)(*given, **named)


def _plain_fields(text: str) -> bool:
    fields = [(field, spec) for _, field, spec, _ in string.Formatter().parse(text) if field is not None]
    return all(not spec and (not field or field.replace("_", "a").isalnum()) for field, spec in fields)
