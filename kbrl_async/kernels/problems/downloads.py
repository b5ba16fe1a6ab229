"""Models of the hub that a problem's module loads, as all of KernelBench's level 4 does, found without running it.

References run in a sandbox without network that reads one folder of models, `HF_HUB_CACHE`, and only where that is set.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kbrl_async.errors import ProblemError
from protocols.records import Problem

CACHE = "HF_HUB_CACHE"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LOADS = re.compile(r"(?<!Config)\.from_pretrained\(")
"""Anything of the hub but a model's configuration, which is plain values."""
_SHOWN = 3


def models_of(problem: Problem) -> list[str]:
    """Names that `from_pretrained` is given: as a word, or by a name that the file gives one."""
    if "from_pretrained" not in problem.source:
        return []
    tree = ast.parse(problem.source)
    words = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return list(dict.fromkeys(name for name in _given(tree, words) if _NAME.fullmatch(name)))


def _given(tree: ast.Module, words: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr != "from_pretrained":
            continue
        match node.args[0]:
            case ast.Constant(value=str(name)):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in words:
                yield words[name]


def check(problems: Iterable[Problem]) -> None:
    """:raises ProblemError: a model is not where references can read it."""
    missing: dict[str, str] = {}
    for problem in problems:
        if handed := _handed_over(problem):
            names = ", ".join(models_of(problem))
            cause = f"{problem.problem_id} loads {names} of the hub, and gives its module an object of it ({handed})"
            cure = "Only tensors, numbers, words and configurations reach a kernel: leave it out, as level=1,2,3"
            raise ProblemError(cause, cure)
        missing |= {name: problem.problem_id for name in models_of(problem) if not is_there(name)}
    if missing:
        shown = list(missing)
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        cause = f"{missing[shown[0]]} loads {', '.join(shown[:_SHOWN])}{more} of the hub, and {_where()}"
        cure = f"Fetch it ({CACHE}=DIR hf download {shown[0]}) and export {CACHE}=DIR, or leave level 4 out"
        raise ProblemError(cause, cure)


def _handed_over(problem: Problem) -> str:
    """What of `from_pretrained` its `get_init_inputs` returns, but for configurations; empty: nothing."""
    if "from_pretrained" not in problem.source:
        return ""
    body = ast.parse(problem.source).body
    loaded = {
        target.id
        for node in body
        if isinstance(node, ast.Assign) and _LOADS.search(ast.unparse(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    makers = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "get_init_inputs"]
    used = {node.id for maker in makers for node in ast.walk(maker) if isinstance(node, ast.Name)}
    return next(iter(sorted(loaded & used)), "")


def is_there(name: str) -> bool:
    """A whole snapshot of the model: its configuration and weights."""
    folder = os.environ.get(CACHE)
    if not folder:
        return False
    snapshots = Path(folder) / f"models--{name.replace('/', '--')}" / "snapshots"
    kinds = ("*.safetensors", "*.bin")
    return any((s / "config.json").exists() and any(any(s.glob(k)) for k in kinds) for s in snapshots.glob("*"))


def _where() -> str:
    folder = os.environ.get(CACHE)
    return f"{folder} has no such model" if folder else f"{CACHE}, the only models that the sandbox reads, is not set"
