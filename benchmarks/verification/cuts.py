"""A problem's text with smaller sizes, for hosts that do not hold its own: names at its top level, and numbers where it
makes its inputs.

Nobody knows from a text which of its sizes belong together, so there are several ways; whoever tries them takes the
first whose reference runs.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator

_MAKERS = ("get_inputs", "get_init_inputs")
_BATCH = re.compile(r"batch|^(B|N)$", re.IGNORECASE)
_LEAST = 2
_SIGNS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow, ast.LShift: operator.lshift,
}  # fmt: skip
Smaller = Callable[[int], int]


def halved(most: int) -> Smaller:
    """As often as it is too large: what divides it often divides it still.

    >>> [halved(64)(size) for size in (3, 64, 768, 4096, 8205)]
    [3, 64, 48, 64, 64]
    """

    def smaller(size: int) -> int:
        while size > most:
            size //= 2
        return size

    return smaller


def clipped(most: int) -> Smaller:
    return lambda size: min(size, most)


def cuts(source: str, most: int) -> Iterator[tuple[str, str]]:
    """Ways and texts, those that are cut most last; each text once. A text that does not parse has none."""
    try:
        ast.parse(source)
    except SyntaxError:
        return
    seen = {source}
    ways = {
        f"sizes halved to {most}": cut(source, halved(most)),
        f"named sizes halved to {most}": cut(source, halved(most), makers=False),
        f"sizes at most {most}": cut(source, clipped(most)),
        f"named sizes at most {most}": cut(source, clipped(most), makers=False),
        f"sizes halved to {most // 4}": cut(source, halved(most // 4)),
        f"batches of {_LEAST}": cut(source, clipped(_LEAST), makers=False, only=_BATCH),
    }
    for way, text in ways.items():
        if text not in seen:
            seen.add(text)
            yield way, text


def cut(source: str, smaller: Smaller, *, makers: bool = True, only: re.Pattern[str] | None = None) -> str:
    """With each size made `smaller`. `makers`: numbers in the functions that make inputs as well; `only`: of names.

    >>> cut("N = 2048 * 2\\nM, K = 8, 1000\\nEPS = 1e-5", clipped(64))
    'N = 64\\nM, K = (8, 64)\\nEPS = 1e-5'
    """
    places: list[tuple[ast.expr, str]] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and (only is None or only.search(ast.unparse(node.targets[0]))):
            value = _made_smaller(node.value, smaller)
            if value is not None:
                places.append((node.value, value))
        elif makers and isinstance(node, ast.FunctionDef) and node.name in _MAKERS:
            numbers = (one for one in ast.walk(node) if isinstance(one, ast.Constant))
            places += [(one, made) for one in numbers if (made := _made_smaller(one, smaller)) is not None]
    return _with(source, places)


def _made_smaller(node: ast.expr, smaller: Smaller) -> str | None:
    """None where it is no size, or small enough."""
    if isinstance(node, ast.Tuple | ast.List):
        parts = [(ast.unparse(one), _made_smaller(one, smaller)) for one in node.elts]
        if all(part is None for _, part in parts):
            return None
        inner = ", ".join(own if part is None else part for own, part in parts)
        return f"[{inner}]" if isinstance(node, ast.List) else f"({inner},)" if len(parts) == 1 else f"({inner})"
    size = _number(node)
    return None if size is None or smaller(size) == size else str(smaller(size))


def _number(node: ast.expr) -> int | None:
    """Of whole numbers written out."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp) or type(node.op) not in _SIGNS:
        return None
    left, right = _number(node.left), _number(node.right)
    return None if left is None or not right else _SIGNS[type(node.op)](left, right)


def _with(source: str, places: list[tuple[ast.expr, str]]) -> str:
    """Columns are counted in bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for node, text in sorted(places, key=lambda place: (-place[0].lineno, -place[0].col_offset)):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        end = lines[last][node.end_col_offset or 0 :]
        lines[first : last + 1] = [lines[first][: node.col_offset] + text.encode() + end]
    return b"".join(lines).decode()
