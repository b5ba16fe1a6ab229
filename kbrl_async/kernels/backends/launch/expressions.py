"""Arithmetic over sizes, as launch plans write it: read from syntax, evaluated by us, never by Python.

Numbers, names, `x.shape[0]`, `x.numel`, `+ - * / // %`, unary `-`, and `max`, `min`, `cdiv`, `next_pow2`, `sqrt`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_LENGTH = 200
_LARGEST = 1 << 62
Number = int | float
Evaluate = Callable[[Mapping[str, Any]], Number]
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "cdiv": lambda a, b: -(-a // b),
    "next_pow2": lambda a: 1 << max(0, int(a) - 1).bit_length(),
    "sqrt": math.sqrt,
}


class ExpressionError(ValueError):
    """An expression that is none of ours, or has no value."""


def parse(text: str) -> Evaluate:
    """A function of the names' values: numbers, or tensors for `.shape[i]` and `.numel`.

    >>> parse("cdiv(n, 256) * 2")({"n": 1000})
    8
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression of {len(text)} characters; at most {MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text!r} is no expression") from error
    evaluate = _compile(tree, text)

    def checked(names: Mapping[str, Any]) -> Number:
        try:
            value = evaluate(names)
        except (ZeroDivisionError, OverflowError, TypeError, IndexError, ValueError) as error:
            raise ExpressionError(f"{text!r} has no value: {error}") from error
        if not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
            raise ExpressionError(f"{text!r} is not a number of a reasonable size")
        return value

    return checked


def _compile(node: ast.expr, text: str) -> Callable[[Mapping[str, Any]], Any]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
        return lambda names: value
    if isinstance(node, ast.Name):
        return _name(node.id, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        apply, left, right = _OPERATORS[type(node.op)], _compile(node.left, text), _compile(node.right, text)
        return lambda names: apply(_number(left(names)), _number(right(names)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _compile(node.operand, text)
        return lambda names: -_number(operand(names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node, node.func.id, text)
    return _of_tensor(node, text)


def _name(name: str, text: str) -> Callable[[Mapping[str, Any]], Any]:
    def look_up(names: Mapping[str, Any]) -> Any:
        if name not in names:
            raise ExpressionError(f"{text!r}: {name!r} is no input, constructor argument or size")
        return names[name]

    return look_up


def _call(node: ast.Call, name: str, text: str) -> Callable[[Mapping[str, Any]], Any]:
    function = _FUNCTIONS.get(name)
    if function is None:
        raise ExpressionError(f"{text!r}: there is no function {name!r}; there are {', '.join(_FUNCTIONS)}")
    arguments = [_compile(argument, text) for argument in node.args]
    return lambda names: function(*(_number(argument(names)) for argument in arguments))


def _of_tensor(node: ast.expr, text: str) -> Callable[[Mapping[str, Any]], Any]:
    """`x.shape[-1]` or `x.numel`."""
    if isinstance(node, ast.Attribute) and node.attr == "numel" and isinstance(node.value, ast.Name):
        tensor = _name(node.value.id, text)
        return lambda names: math.prod(tensor(names).shape)
    is_shape = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if is_shape and isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
        owner, index = node.value.value, ast.unparse(node.slice)
        if isinstance(owner, ast.Name) and index.lstrip("-").isdigit() and len(index) < 4:
            tensor, place = _name(owner.id, text), int(index)
            return lambda names: int(tensor(names).shape[place])
    raise ExpressionError(f"{text!r}: only numbers, names, x.shape[0], x.numel, + - * / // % and functions of them")


def _number(value: Any) -> Number:
    if isinstance(value, (int, float)) and abs(value) < _LARGEST:
        return value
    raise TypeError("only numbers of a reasonable size can be computed with")
