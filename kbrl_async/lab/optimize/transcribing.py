"""Writes C for a module whose forward it can follow: element-wise expressions and reductions over rows.

No model has a hand in this: it is the floor under a small policy that never saw such a module, and what it writes is
verified and refined like any other attempt. What it can't follow it says, and leaves to the policy.

::

    forward's syntax tree ─ Reader ─▶ C lines of one row ─▶ kernel(rows, cols) + ModelNew, in a few variants
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence

from kbrl_async.lab.optimize.following import Operand, Reader, Unfollowed

MOST_VARIANTS = 8


def transcriptions(source: str) -> list[str]:
    """Candidates for the problem in `source`, the likeliest first.

    :raises Unfollowed: its forward does more than this follows.
    """
    tree = ast.parse(source)
    model = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Model"), None)
    if model is None:
        raise Unfollowed("there is no class Model")
    constants = [n for n in tree.body if isinstance(n, ast.Assign) and not _has_call_of_torch(n)]
    names = Reader(model, {}).operands_of()
    found = []
    for layouts in itertools.islice(_layouts(names, tree), MOST_VARIANTS):
        reader = Reader(model, layouts)
        kernel = reader.read()
        found += [_render(model, reader, kernel, constants, fast) for fast in (True, False)]
    return found


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _render(model: ast.ClassDef, reader: Reader, lines: list[str], constants: list[ast.Assign], fast: bool) -> str:
    tensors, buffers = list(reader.operands.values()), range(reader.code.buffers)
    parameters = [f"const float *restrict {t.name}" for t in tensors]
    parameters += ["float *restrict out", *(["float *restrict scratch"] if buffers else [])]
    parameters += ["long rows", "long cols", *(f"float k{i}" for i in range(len(reader.numbers)))]
    body = ["        " + line for line in lines]
    last = [f"    out[0] = {reader.result.code};"] if reader.result.kind == "all" else []
    kernel = [
        *(['#pragma GCC optimize("Ofast")'] if fast else []),
        "#include <math.h>",
        f"void run({', '.join(parameters)}) {{",
        *(f"    float *restrict t{i} = scratch + {i} * cols;" for i in buffers),
        *("    " + line for line in reader.code.globals),
        "    for (long r = 0; r < rows; r++) {",
        *body,
        "    }",
        *last,
        "}",
    ]
    head = ["import math", "import torch", "import torch.nn as nn", "from kbrl_async.launch import c_kernel"]
    head += [ast.unparse(node) for node in constants]
    return "\n".join([*head, 'SOURCE = r"""', *kernel, '"""', "", "", *_model_new(reader, tensors)]) + "\n"


def _model_new(reader: Reader, tensors: Sequence[Operand]) -> list[str]:
    init = reader.init
    signature = ast.unparse(_Unannotated().visit(init.args)) if init is not None else "self"
    kept = [n for n in init.body if not _is_docstring(n)] if init is not None else []
    own = [line for n in kept if "super(" not in ast.unparse(n) for line in ast.unparse(n).splitlines()]
    main = reader.operands[reader.main or next(iter(reader.operands))].python
    shape = {"each": f"torch.empty_like({main})", "all": "torch.empty(())"}
    keep = f"torch.empty(*{main}.shape[:-1], 1)" if reader.result.keep else f"torch.empty({main}.shape[:-1])"
    scratch = [f"        scratch = torch.empty({reader.code.buffers}, cols)"] if reader.code.buffers else []
    numbers = [f"float({text})" for text in reader.numbers]
    given = ["out", *(["scratch"] if scratch else []), "rows", "cols"]
    passed = [*(t.python for t in tensors), *given, *numbers]
    return [
        "class ModelNew(nn.Module):",
        f"    def __init__({signature}):",
        "        super().__init__()",
        *("        " + line for line in own),
        '        self.kernel = c_kernel(SOURCE, "run")',
        "",
        f"    def forward({', '.join(('self', *reader.arguments))}):",
        *(f"        {name} = {name}.contiguous()" for name in reader.arguments),
        f"        cols = {main}.shape[-1]",
        f"        rows = {main}.numel() // cols",
        f"        out = {shape.get(reader.result.kind, keep)}",
        *scratch,
        f"        self.kernel({', '.join(passed)})",
        "        return out",
    ]


def _layouts(names: Sequence[str], tree: ast.Module) -> Iterator[dict[str, str]]:
    """Ways in which the operands may lie: what the inputs' text shows first, then all others."""
    shown = _shown_layouts(tree)
    model = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Model")
    arguments = Reader(model, {}).arguments
    guesses = dict(zip(arguments, shown, strict=False))
    first = {name: guesses.get(name) or ("vector" if name.startswith("self_") else "full") for name in names}
    yield first
    if len(shown) >= len(arguments) and all(shown):
        return
    free = [name for name in names if not guesses.get(name) and name != names[0]]
    for choice in itertools.product(("full", "vector", "scalar"), repeat=len(free)):
        made = {**first, **dict(zip(free, choice, strict=True))}
        if made != first:
            yield made


def _shown_layouts(tree: ast.Module) -> list[str]:
    """Of each input whose expression in get_inputs says its sizes; empty where it does not."""
    maker = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "get_inputs"), None)
    if maker is None or not isinstance(maker.body[-1], ast.Return) or not isinstance(maker.body[-1].value, ast.List):
        return []
    sizes = [_sizes(item) for item in maker.body[-1].value.elts]
    most = max((size for size in sizes if size), key=len, default=None)
    return [_layout(size, most) for size in sizes]


def _sizes(node: ast.expr) -> list[str]:
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("randn", "rand", "zeros", "ones", "empty"):
            sizes = call.args[0].elts if call.args and isinstance(call.args[0], ast.Tuple) else call.args
            return [ast.unparse(size) for size in sizes] or [""]
    return []


def _layout(size: list[str], most: list[str] | None) -> str:
    if not size or most is None:
        return ""
    if size == most:
        return "full"
    if size in ([""], ["1"]):
        return "scalar"
    if len(size) == len(most) and size[-1] == "1" and size[:-1] == most[:-1]:
        return "column"
    return "vector" if [part for part in size if part != "1"] == most[-1:] else ""


class _Unannotated(ast.NodeTransformer):
    """Annotations may name what the kernel's file does not import."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)


def _has_call_of_torch(node: ast.Assign) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "torch" for n in ast.walk(node))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
