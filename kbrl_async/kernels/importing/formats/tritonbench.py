"""TritonBench-T: a function, a line of `#`, and a test. The first call's arguments have the inputs' shapes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kbrl_async.kernels.importing.found import Found, LeftOut, parsed, stem_of, with_model_of

FRESH = """def _fresh(value):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        return value
    return torch.randn_like(value) if (value < 0).any() else torch.rand_like(value) * value.max()


"""
"""Tests give constants: a problem wants other values of that shape and sign at each draw."""
LINE = re.compile(r"^#{40,}\s*$", re.MULTILINE)


def knows(place: Path) -> bool:
    return place.is_dir() and any(
        LINE.search(path.read_text(encoding="utf-8", errors="replace")) for path in sorted(place.glob("*.py"))[:5]
    )


def read(place: Path) -> Iterator[Found]:
    for path in sorted(place.glob("*.py")):
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
    before, call = _first_call(tests[0], functions[-1])
    constants = ", ".join(f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords)
    if any(not isinstance(word.value, ast.Constant) for word in call.keywords):
        raise LeftOut("keyword arguments that are no constants")
    lines = [f"    {line}" for node in before for line in _on_cpu(node).splitlines()]
    made = ", ".join(_on_cpu(argument) for argument in call.args)
    inputs = FRESH + "\n".join(["def get_inputs():", *lines, f"    return [_fresh(value) for value in [{made}]]"])
    model = with_model_of(code, functions[-1], constants)
    return f"{model}\n\n{inputs}\n\n\ndef get_init_inputs():\n    return []\n"


def _first_call(test: ast.FunctionDef, function: str) -> tuple[list[ast.stmt], ast.Call]:
    """The statements before the first call, and the call."""
    before: list[ast.stmt] = []
    for node in test.body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == function:
                return before, inner
        before.append(node)
    raise LeftOut("the test does not call it")


def _on_cpu(node: ast.AST) -> str:
    """The text, with no device named."""
    text = re.sub(r""",?\s*device=(['"]cuda(:0)?['"]|device)""", "", ast.unparse(node))
    return re.sub(r"""\.cuda\(\)|\.to\(['"]cuda(:0)?['"]\)""", "", text)
