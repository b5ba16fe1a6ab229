"""From checkouts of other people's kernels to folders of pairs. Nothing is run, nothing of theirs is kept here.

An operator of a library becomes a candidate whose ModelNew calls it, for a problem of `posed`; kernels without one are
only built.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from benchmarks.verification import posed
from benchmarks.verification.cheats import Cheat, on_cpu, on_gpu
from kbrl_async.kernels.problems import beside

_MODEL = """

import torch as _torch


class ModelNew(_torch.nn.Module):
    def forward(self, {arguments}):
        return {call}
"""
_EXTENSION = """
import pathlib

import torch
from torch.utils.cpp_extension import load

extension = load(name="{name}", sources=[str(pathlib.Path(__file__).with_name("kernel.cu"))])
"""
_CALLS = """

class ModelNew(torch.nn.Module):
    def forward(self, *inputs):
        return extension.forward(*inputs)
"""
_OPERATOR = """{first}
import torch
import triton

from {package}.{module} import {function}


class ModelNew(torch.nn.Module):
    def forward(self, {arguments}):
        return {call}
"""


class Packed(msgspec.Struct, frozen=True):
    """What of a package its imports do not name."""

    first: str = ""
    """What a candidate does before it is imported."""
    also: tuple[str, ...] = ()
    """Files that it finds at run time, below the package."""
    init: str = ""
    """Its `__init__.py`, without what that would import."""
    below: str = "ops."
    """Where its modules are."""
    inits: tuple[str, ...] = ("", "ops")
    """Packages whose `__init__.py` would import all of them."""
    mended: tuple[str, str, str] = ("", "", "")
    """A file, a text in it, and what stands there instead: what keeps all of it from running under a newer Triton."""


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


def leaderboard(checkout: Path, corpus: Path) -> int:
    """What models answered to KernelBench's first problems, as its leaderboard keeps it: by `load_inline`."""
    place, made = checkout / "docs" / "assets", 0
    found = json.loads((place / "data.json").read_text())
    for name, answers in found.items():
        level, number = re.findall(r"\d+", name)[:2]
        problem = (place / "problems" / f"l{level}_p{number}.py").read_text()
        for answer in answers:
            candidate = place / "solutions" / f"{answer['file']}.py"
            if candidate.is_file():
                made += _pair(corpus / f"l{level}_p{number}_{answer['file'][:6]}", candidate.read_text(), problem)
    return made


def tritonbench(checkout: Path, corpus: Path) -> int:
    """TritonBench-G: kernels of a file and the function that launches them, with a problem where one is posed; its
    test below the line is left out.
    """
    wanted: dict[str, list[posed.Posed]] = {}
    for one in posed.posed(posed.TRITONBENCH):
        wanted.setdefault(one.module, []).append(one)
    made = 0
    for path in sorted(checkout.glob("data/TritonBench_G_v1/*.py")):
        text = re.split(r"^#{20,}\s*$", path.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
        for one in wanted.get(path.stem, []):
            model = _MODEL.format(call=one.call, arguments=one.arguments)
            made += _pair(corpus / one.name, text + model, one.problem)
        if path.stem not in wanted and (call := _entry(text)):
            made += _pair(corpus / path.stem, text + _called(call))
    return made


def liger(checkout: Path, corpus: Path) -> int:
    """Liger-Kernel's operators, each with what it needs of its package: with a problem, and those that have none."""
    package = checkout / "src" / "liger_kernel"
    made = _operators(package, posed.posed(posed.LIGER), corpus, Packed())
    return made + _package(package, "ops", corpus, {one.module for one in posed.posed(posed.LIGER)})


def flaggems(checkout: Path, corpus: Path) -> int:
    """FlagGems' operators, each with what it needs of its package."""
    return _operators(checkout / "src" / "flag_gems", posed.posed(posed.FLAGGEMS), corpus, _FLAGGEMS)


def flash_linear_attention(checkout: Path, corpus: Path) -> int:
    """Operators and modules of flash-linear-attention, each with what it needs of its package."""
    return _operators(checkout / "fla", posed.posed(posed.FLA), corpus, _FLA)


def robust_kbench(checkout: Path, corpus: Path) -> int:
    """CUDA with bindings of its own, loaded from beside the candidate: highlighted kernels and those of its tasks."""
    made = 0
    for path in sorted([*checkout.glob("highlighted/*/*/kernel.cu"), *checkout.glob("tasks/*/*ward.cu")]):
        task, way = (path.parts[-3], path.parts[-2]) if path.stem == "kernel" else (path.parts[-2], path.stem)
        name, text = f"{path.parts[-4] if path.stem == 'kernel' else 'tasks'}_{task}_{way}", path.read_text()
        posed_by = checkout / "tasks" / task / "func_forward.py"
        if way == "forward" and posed_by.is_file():
            problem = _configured(posed_by.read_text(), posed_by.with_name("config_forward.json"))
            made += _pair(corpus / name, _with_kernel(name, problem), problem, {"kernel.cu": text})
        else:
            made += _pair(corpus / name, _EXTENSION.format(name=name) + _CALLS, files={"kernel.cu": text})
    return made


def cheats(checkout: Path, corpus: Path) -> int:
    """Hostile pairs in C for a CPU; `checkout` is not read."""
    return _hostile(on_cpu.all_of_them(), corpus)


def gpu_cheats(checkout: Path, corpus: Path) -> int:
    """Hostile pairs for a GPU; `checkout` is not read."""
    return _hostile(on_gpu.all_of_them(), corpus)


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
    "leaderboard": leaderboard,
    "tritonbench": tritonbench,
    "liger": liger,
    "flaggems": flaggems,
    "fla": flash_linear_attention,
    "robust-kbench": robust_kbench,
    "files": files,
    "cheats": cheats,
    "gpu-cheats": gpu_cheats,
}
_FLA = Packed(init='__version__ = "0"\n', below="", inits=("", "ops", "modules"))
# From Triton 3.3 on a compiled kernel is launched with its constexprs, too; FlagGems leaves them out after 3.5.
_FLAGGEMS = Packed(
    'import os\n\nos.environ.setdefault("GEMS_VENDOR", "nvidia")\n',
    ("runtime/backend/_nvidia/*.py", "runtime/backend/_nvidia/*.yaml", "runtime/backend/backend_utils.py"),
    'device = "cuda"\nvendor_name = "nvidia"\n',
    mended=(
        "utils/libentry.py",
        "major_version == 3 and 3 <= minor_version <= 5",
        "(major_version, minor_version) >= (3, 3)",
    ),
)


def _operators(package: Path, wanted: Iterable[posed.Posed], corpus: Path, how: Packed) -> int:
    """Operators with their problems, as far as they are there. Its `__init__.py`s would bring all of it along."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(package, Path(folder) / package.name))
        for place in how.inits:
            (copy / place / "__init__.py").write_text(how.init)
        file, old, new = how.mended
        if (copy / file).is_file():
            (copy / file).write_text((copy / file).read_text().replace(old, new))
        return sum(_operator(copy, one, corpus, how) for one in wanted)


def _operator(package: Path, one: posed.Posed, corpus: Path, how: Packed) -> int:
    module = how.below + one.module
    if not package.joinpath(*module.split(".")).with_suffix(".py").is_file():
        return 0
    source = _OPERATOR.format(
        first=how.first, package=package.name, module=module, function=one.function, arguments=one.arguments,
        call=one.call,
    )  # fmt: skip
    found = beside.files_of(beside.gathered(package.with_name("candidate.py"), source))
    more = [path for pattern in how.also for path in package.glob(pattern)]
    found |= {path.relative_to(package.parent).as_posix(): path.read_text() for path in more}
    return _pair(corpus / one.name, beside.pack(source, found), one.problem)


def _configured(problem: str, config: Path) -> str:
    """A task of robust-kbench with the first of its configurations, in a problem's form: it gives them by name."""
    told = json.loads(config.read_text()) if config.is_file() else {}
    shared, init, drawn = ((told.get(f"single_{kind}_configs") or [{}])[0] for kind in ("shared", "init", "input"))
    model = next(node for node in ast.parse(problem).body if isinstance(node, ast.ClassDef) and node.name == "Model")
    made = next((node for node in model.body if getattr(node, "name", "") == "__init__"), None)
    names = [] if not isinstance(made, ast.FunctionDef) else made.args.args[1:]
    defaults = [] if not isinstance(made, ast.FunctionDef) else made.args.defaults
    known = dict(zip((one.arg for one in names[len(names) - len(defaults) :]), map(ast.unparse, defaults), strict=True))
    known |= {name: repr(value) for name, value in {**shared, **init}.items()}
    arguments = ", ".join(known[one.arg] for one in names if one.arg in known)
    inputs = ", ".join(f"{name}={value!r}" for name, value in {**shared, **drawn}.items())
    problem = problem.replace("def get_inputs(", "def _get_inputs(")
    problem += f"\n\ndef get_inputs():\n    return _get_inputs({inputs})\n"
    return f"{problem}\n\ndef get_init_inputs():\n    return [{arguments}]\n"


def _with_kernel(name: str, problem: str) -> str:
    """The task's own module, whose function is the kernel: its weights are where the reference has them."""
    tree = ast.parse(problem)
    kept = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    model = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model")
    model.name = "ModelNew"
    text = re.sub(r"super\(Model,", "super(ModelNew,", ast.unparse(model))
    imports = "\n".join(map(ast.unparse, kept))
    return f"{imports}\n{_EXTENSION.format(name=name)}forward_fn = extension.forward\n\n\n{text}\n"


def _hostile(found: dict[str, Cheat], corpus: Path) -> int:
    for name, cheat in found.items():
        expected = json.dumps({"rules": cheat.rules, "told_by": cheat.told_by})
        _pair(corpus / re.sub(r"\W+", "-", name), cheat.source, cheat.problem, {"expected.json": expected})
    return len(found)


def _package(package: Path, folder: str, corpus: Path, without: Collection[str] = ()) -> int:
    """Each module of `package/folder` that has a kernel, as a candidate with what it needs of its package."""
    made = 0
    for path in sorted((package / folder).glob("*.py")):
        text = path.read_text()
        call = _entry(text)
        if path.stem in {"__init__", *without} or not call or "triton" not in text:
            continue
        module = ".".join([package.name, folder, path.stem])
        name = call.partition(".")[0]
        source = f"import triton\n\nfrom {module} import {name}\n{_called(call)}"
        made += _pair(corpus / path.stem, beside.gathered(package.with_name("candidate.py"), source))
    return made


def _called(call: str) -> str:
    return _MODEL.format(call=f"{call}(*inputs)", arguments="*inputs")


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
