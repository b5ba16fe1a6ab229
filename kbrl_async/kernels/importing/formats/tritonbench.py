"""TritonBench-T: a function, a line of `#`, and a test. The call with the largest arguments says what inputs are like.

A test writes most tensors out: what it gives the same twice is drawn again, in that shape and range.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kbrl_async.kernels.importing.found import Found, LeftOut, fresh_inputs, parsed, stem_of, with_model_of

LINE = re.compile(r"^#{40,}\s*$", re.MULTILINE)
IN_A_CHECKOUT = "TritonBench_T_v1"


def knows(place: Path) -> bool:
    return any(LINE.search(path.read_text(encoding="utf-8", errors="replace")) for path in _files(place)[:5])


def _files(place: Path) -> list[Path]:
    """Of a folder, or of a checkout, which has them in a folder of `data`."""
    inner = (place / "data" / IN_A_CHECKOUT, place / IN_A_CHECKOUT)
    return sorted(next(filter(Path.is_dir, inner), place).glob("*.py"))


def read(place: Path) -> Iterator[Found]:
    for path in _files(place):
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            yield Found(stem_of(path.stem), source_of(text), origin=path.name)
        except LeftOut as reason:
            yield Found(stem_of(path.stem), "", origin=path.name, left_out=str(reason))


def source_of(text: str) -> str:
    """:raises LeftOut: its parts are not where they should be."""
    parts = LINE.split(text)
    if len(parts) < 2:
        raise LeftOut("no test in it")
    code, test = parts[0], parts[1]
    functions = [node.name for node in parsed(code) if isinstance(node, ast.FunctionDef)]
    tests = [node for node in parsed(test) if isinstance(node, ast.FunctionDef)]
    if not functions or not tests:
        raise LeftOut("no function, or no test of it")
    calls = list(_calls(tests[0], functions[-1]))
    if not calls:
        raise LeftOut("the test does not call it")
    before, call = max(calls, key=_size)
    constants = [f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords if _is_constant(word.value)]
    drawn = [word for word in call.keywords if not _is_constant(word.value)]
    if any(word.arg is None for word in drawn) or any(isinstance(node, ast.Starred) for node in call.args):
        raise LeftOut("arguments that are not written out")
    places = [f"{word.arg}=inputs[{len(call.args) + n}]" for n, word in enumerate(drawn)]
    lines = "\n".join(f"    {line}" for node in before for line in _on_cpu(node).splitlines())
    made = ", ".join(_on_cpu(node) for node in (*call.args, *(word.value for word in drawn)))
    given = f"*inputs[:{len(call.args)}]" if drawn else "*inputs"
    model = with_model_of(code, functions[-1], ", ".join((*places, *constants)), given)
    inputs = fresh_inputs(made, lines or "    pass")
    return f"{model}\n\n{inputs}\n\ndef get_init_inputs():\n    return []\n"


class _Call(NamedTuple):
    before: list[ast.stmt]
    call: ast.Call


def _calls(test: ast.FunctionDef, function: str) -> Iterator[_Call]:
    """Each call with the statements before it that it needs, none of which calls the function."""
    before: list[ast.stmt] = []
    for node in test.body:
        inside = [
            inner
            for inner in ast.walk(node)
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == function
        ]
        if not inside:
            before.append(node)
        elif isinstance(node, ast.Assign | ast.Expr):
            yield _Call(_needed(before, inside[0]), inside[0])


def _needed(before: list[ast.stmt], call: ast.Call) -> list[ast.stmt]:
    """Those that bind a name which the call, or a later one of them, reads."""
    names, kept = _names(call, ast.Load), list[ast.stmt]()
    for node in reversed(before):
        if names & _names(node, ast.Store):
            names |= _names(node, ast.Load)
            kept.insert(0, node)
    return kept


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, context)}


def _size(made: _Call) -> int:
    """About as many elements as the written tensors of a call have; the first of several wins."""
    names = {node.id for node in ast.walk(made.call) if isinstance(node, ast.Name)}
    last = {ast.unparse(node.targets[0]): node.value for node in made.before if isinstance(node, ast.Assign)}
    return sum(_elements(last[name]) for name in names if name in last) + _elements(made.call)


def _elements(node: ast.AST) -> int:
    """Of a list the numbers in it, of `torch.randn(2, 3)` the product."""
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call) and inner.args]
    total = sum(isinstance(inner, ast.Constant) for inner in ast.walk(node))
    for call in calls:
        product = 1
        for argument in call.args:
            found = argument.elts if isinstance(argument, ast.Tuple) else [argument]
            for one in found:
                product *= one.value if isinstance(one, ast.Constant) and isinstance(one.value, int) else 1
        total += min(product, 1 << 20)
    return total


def _is_constant(node: ast.expr) -> bool:
    """A number, a word, a list of them, or a name of torch's, as `torch.float64`."""
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.")
    )


def _on_cpu(node: ast.AST) -> str:
    """The text, with no device named."""
    text = re.sub(r""",?\s*device=(['"]cuda(:0)?['"]|device)""", "", ast.unparse(node))
    return re.sub(r"""\.cuda\(\)|\.to\(['"]cuda(:0)?['"]\)""", "", text)
