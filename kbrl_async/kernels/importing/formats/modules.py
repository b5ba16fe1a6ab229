"""A folder of plain PyTorch modules: a class or a function in each file, and what to call it with.

`get_inputs()`, or `example_inputs` (a list or tuple of tensors), or a call of it with no argument; `get_init_inputs()`
where the constructor wants arguments. Examples that are the same each time say what inputs are like: they are drawn
again, in their shape and range. A file with KernelBench's contract is taken as it is, an archive of `torch.export` as
its graph.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kbrl_async.kernels.importing.formats import exported
from kbrl_async.kernels.importing.found import Found, LeftOut, as_model, fresh_inputs, parsed, stem_of, with_model_of
from kbrl_async.kernels.problems.contract import bound_names

EXAMPLES = "example_inputs"


def knows(place: Path) -> bool:
    return next(exported.archives(place), None) is not None or next(place.rglob("*.py"), None) is not None


def read(place: Path) -> Iterator[Found]:
    for path in exported.archives(place):
        origin = str(path.relative_to(place)) if path != place else path.name
        try:
            source, level = exported.source_of(path)
            yield Found(stem_of(path.stem), source, level, origin)
        except LeftOut as reason:
            yield Found(stem_of(path.stem), "", origin=origin, left_out=str(reason))
    for path in sorted(place.rglob("*.py")):
        level = next((int(p[5:]) for p in path.parts if p.startswith("level") and p[5:].isdigit()), 1)
        origin = str(path.relative_to(place))
        try:
            source = source_of(path.read_text(encoding="utf-8", errors="replace"))
            yield Found(stem_of(path.stem), source, level, origin)
        except LeftOut as reason:
            yield Found(stem_of(path.stem), "", level, origin, left_out=str(reason))


def source_of(text: str) -> str:
    """:raises LeftOut: it has no module or function, or nothing says what to call it with."""
    body = parsed(text)
    names = bound_names(body)
    if "Model" not in names:
        text = _with_model(text, body)
    if "get_inputs" not in names:
        if EXAMPLES not in names:
            raise LeftOut("no get_inputs and no example_inputs")
        is_function = any(isinstance(node, ast.FunctionDef) and node.name == EXAMPLES for node in body)
        called = f"*{EXAMPLES}()" if is_function else f"*{EXAMPLES}"
        library = "" if "torch" in names else "import torch\n\n\n"
        text = f"{text.rstrip()}\n\n\n{library}{fresh_inputs(called)}"
    if "get_init_inputs" not in names:
        text = f"{text.rstrip()}\n\n\ndef get_init_inputs():\n    return []\n"
    return text


def _with_model(text: str, body: list[ast.stmt]) -> str:
    modules: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef) and any(_is_module(ast.unparse(base), modules) for base in node.bases):
            modules.append(node.name)
    if modules:
        return as_model(text, modules[-1])
    functions = [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("get_") and node.name != EXAMPLES
    ]
    if not functions:
        raise LeftOut("no module and no function in it")
    return with_model_of(text, functions[-1])


def _is_module(base: str, known: list[str]) -> bool:
    """Torch's own, as `nn.Conv2d`, or one of the file."""
    return base.endswith("Module") or base.startswith(("nn.", "torch.nn.")) or base in known
