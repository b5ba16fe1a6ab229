"""From checkouts of other people's kernels to folders of pairs. Nothing is run, nothing of theirs is kept here.

An operator of a library becomes a candidate whose ModelNew calls it; where its reference is not in the same checkout,
the pair has no problem and is only built.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from kbrl_async.kernels.problems import beside

_MODEL = """

import torch as _torch


class ModelNew(_torch.nn.Module):
    def forward(self, *inputs):
        return {call}(*inputs)
"""
_EXTENSION = """
import pathlib

import torch
from torch.utils.cpp_extension import load

extension = load(name="{name}", sources=[str(pathlib.Path(__file__).with_name("kernel.cu"))])


class ModelNew(torch.nn.Module):
    def forward(self, *inputs):
        return extension.forward(*inputs)
"""


def kernelbench(checkout: Path, corpus: Path) -> int:
    """Its prompts' examples: `model_ex_NAME.py` with every `model_new_ex_NAME*.py`; kernels that its tests have."""
    made = 0
    for candidate in sorted(checkout.rglob("model_new_ex_*.py")):
        stem = candidate.stem.removeprefix("model_new_ex_")
        found = [candidate.with_name(f"model_ex_{stem[:end]}.py") for end in range(len(stem), 0, -1)]
        problem = next((path for path in found if path.is_file()), None)
        name = f"{candidate.parent.name}-{stem}"
        made += _pair(corpus / name, candidate.read_text(), problem.read_text() if problem else "")
    return made


def tritonbench(checkout: Path, corpus: Path) -> int:
    """TritonBench-G: each file's kernels and the function that launches them; its test below the line is left out."""
    made = 0
    for path in sorted(checkout.glob("data/TritonBench_G_v1/*.py")):
        text = re.split(r"^#{20,}\s*$", path.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
        if call := _entry(text):
            made += _pair(corpus / path.stem, text + _MODEL.format(call=call))
    return made


def liger(checkout: Path, corpus: Path) -> int:
    """Liger-Kernel's operators, each with the package that they are in."""
    return _package(checkout / "src" / "liger_kernel", "ops", corpus)


def flaggems(checkout: Path, corpus: Path) -> int:
    """FlagGems' operators, each with the package that they are in."""
    return _package(checkout / "src" / "flag_gems", "ops", corpus)


def robust_kbench(checkout: Path, corpus: Path) -> int:
    """The highlighted kernels: CUDA with bindings of their own, loaded from beside the candidate."""
    made = 0
    for path in sorted(checkout.glob("highlighted/**/kernel.cu")):
        name = "_".join(path.parent.relative_to(checkout / "highlighted").parts)
        made += _pair(corpus / name, _EXTENSION.format(name=name), files={"kernel.cu": path.read_text()})
    return made


def files(checkout: Path, corpus: Path) -> int:
    """Candidates as they are, one a file; `NAME_problem.py` beside one is its problem."""
    made = 0
    for path in sorted(checkout.glob("*.py")):
        if not path.stem.endswith("_problem"):
            problem = path.with_name(f"{path.stem}_problem.py")
            made += _pair(corpus / path.stem, path.read_text(), problem.read_text() if problem.is_file() else "")
    return made


ADAPTERS: dict[str, Callable[[Path, Path], int]] = {
    "kernelbench": kernelbench,
    "tritonbench": tritonbench,
    "liger": liger,
    "flaggems": flaggems,
    "robust-kbench": robust_kbench,
    "files": files,
}


def _package(package: Path, folder: str, corpus: Path) -> int:
    """Each module of `package/folder` that has a kernel, as a candidate with what it needs of its package."""
    made = 0
    for path in sorted((package / folder).glob("*.py")):
        text = path.read_text()
        call = _entry(text)
        if path.stem == "__init__" or not call or "triton" not in text:
            continue
        module = ".".join([package.name, folder, path.stem])
        name = call.partition(".")[0]
        source = f"import triton\n\nfrom {module} import {name}\n{_MODEL.format(call=call)}"
        made += _pair(corpus / path.stem, beside.gathered(package.with_name("candidate.py"), source))
    return made


def _entry(text: str) -> str:
    """The name to call: the last public function or autograd function's `apply` that is no kernel."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return ""
    found = [name for node in body if (name := _callable(node))]
    return found[-1] if found else ""


def _callable(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef) and not node.decorator_list and not node.name.startswith(("_", "test")):
        return node.name
    if isinstance(node, ast.ClassDef) and any("Function" in ast.unparse(base) for base in node.bases):
        return f"{node.name}.apply"
    return ""


def _pair(folder: Path, candidate: str, problem: str = "", files: dict[str, str] | None = None) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    texts: Iterable[tuple[str, str]] = {"candidate.py": candidate, "problem.py": problem, **(files or {})}.items()
    for name, text in texts:
        if text:
            (folder / name).write_text(text)
    return 1
