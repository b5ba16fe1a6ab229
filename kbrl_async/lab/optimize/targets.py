"""From what a person names to a problem: their own file, or a function or class by import path with example inputs.

::

    my_module.py                    Model, get_inputs, get_init_inputs: taken as it stands
    package.module:name  ─ slice ─▶ what `name` needs, and a Model around it, get_inputs, get_init_inputs
    my_module.py:name    ─ slice ─▶

Invariants
* Nothing of a person's is imported or run here: files are found and parsed; running is the sandbox's.
* `problem` computes what the person's code computes, by calling it; `shown` says the same to the policy.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.problems.contract import bound_names
from kbrl_async.kernels.problems.loading import REQUIRED, load_file
from kbrl_async.lab.optimize.slicing import Slice, definition, joined, slice_of
from protocols.records import Problem

_INPUTS_CURE = "Give example inputs: --inputs 'torch.randn(64, 128)' or --inputs-from module:function"
_HEAD = "import torch\nimport torch.nn as nn\n"


class Given(msgspec.Struct, frozen=True):
    """What the person said beside the name."""

    inputs: str = ""
    inputs_from: str = ""
    init: str = ""


class UserModule(msgspec.Struct, frozen=True):
    problem: Problem
    """What is verified."""
    shown: Problem
    """What the policy reads."""
    kind: str
    """`"file"`, `"function"` or `"class"`."""
    name: str
    title: str
    arguments: tuple[str, ...] = ()
    """Of a function: its parameters that the inputs fill."""

    @property
    def stem(self) -> str:
        """For the name of the file that is written."""
        return re.sub(r"\W+", "_", self.problem.name)


def read_target(wanted: str, given: Given | None = None, shapes: str = "cpu") -> UserModule:
    """:raises UserError: no such file or name, or no inputs for it; ProblemError: the file breaks the contract."""
    given = given or Given()
    place, _, name = wanted.partition(":")
    path = find_file(place)
    if not name and not (given.inputs or given.inputs_from):
        problem = _whole(path, wanted, shapes)
        return UserModule(problem, problem, "file", "Model", str(path))
    return _named(path, name or "Model", given, shapes)


def _whole(path: Path, wanted: str, shapes: str) -> Problem:
    text = _read(path)
    if missing := [name for name in REQUIRED if not _defines(text, name)]:
        cause = f"{wanted} does not define {', '.join(missing)}"
        raise UserError(cause, f"Name what to optimise, {wanted}:name. {_INPUTS_CURE}")
    return load_file(path, shapes=shapes)


def _defines(text: str, name: str) -> bool:
    """A file that does not parse lacks nothing: the loader says where it is broken."""
    try:
        return name in bound_names(ast.parse(text).body)
    except SyntaxError:
        return True


def _named(path: Path, name: str, given: Given, shapes: str) -> UserModule:
    text = _read(path)
    maker_slice, maker = _inputs_from(given, path, text)
    roots = [name, *_names(given.inputs, "--inputs"), *_names(given.init, "--init")]
    own = slice_of(text, [*roots, *(["get_inputs"] if _has_own_inputs(text, given) else [])], str(path))
    node = definition(text, name)
    if node is None:
        known = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        raise UserError(f"{path} defines no function or class {name}", f"It defines: {', '.join(known) or 'none'}")
    body = joined([own, *maker_slice], _HEAD)
    tail = _inputs_text(given, maker, own) + f"\n\ndef get_init_inputs():\n    return [{given.init}]\n"
    stem = path.stem if name == "Model" else f"{path.stem}_{name}"
    arguments = _arguments(node, given) if isinstance(node, ast.FunctionDef) else ()
    wrapper = "" if name == "Model" else _wrapper(node, arguments)
    problem = parse_problem(body + wrapper + tail, f"L0/{stem}", origin=str(path), shapes=shapes)
    shown = parse_problem(_as_model(node, body, arguments) + tail, f"L0/{stem}", origin=str(path), shapes=shapes)
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    return UserModule(problem, shown, kind, name, f"{path.stem}.{name}", arguments)


def _has_own_inputs(text: str, given: Given) -> bool:
    return not (given.inputs or given.inputs_from) and definition(text, "get_inputs") is not None


def _inputs_from(given: Given, path: Path, text: str) -> tuple[list[Slice], str]:
    """The slice of a function that makes inputs, and its name."""
    if not given.inputs_from:
        return [], ""
    place, _, maker = given.inputs_from.rpartition(":")
    where = find_file(place) if place else path
    found = slice_of(text if where == path else _read(where), [maker], str(where))
    if found.missing:
        raise UserError(f"{where} defines no {maker}", "Write --inputs-from module:function")
    return [found], maker


def _inputs_text(given: Given, maker: str, own: Slice) -> str:
    if given.inputs:
        return f"\n\ndef get_inputs():\n    return [{given.inputs}]\n"
    if maker == "get_inputs" or (not maker and any("def get_inputs" in part for part in own.parts)):
        return ""
    if not maker:
        raise UserError("there are no inputs to run it on", _INPUTS_CURE)
    return f"\n\ndef get_inputs():\n    return list({maker}())\n"


def _wrapper(node: ast.FunctionDef | ast.ClassDef, arguments: Sequence[str]) -> str:
    if isinstance(node, ast.ClassDef):
        return f"\n\nclass Model({node.name}):\n    pass\n"
    call = ", ".join(arguments)
    lines = [
        "\n\nclass Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "",
        f"    def forward({', '.join(('self', *arguments))}):",
        f"        return {node.name}({call})\n",
    ]
    return "\n".join(lines)


def _as_model(node: ast.FunctionDef | ast.ClassDef, body: str, arguments: Sequence[str]) -> str:
    """The same module with the person's code inside Model, as models are used to read it."""
    tree = ast.parse(body)
    others = [n for n in tree.body if getattr(n, "name", "") != node.name]
    rest = _HEAD + "\n".join(ast.unparse(n) for n in others if not _is_plain_import(n)) + "\n\n\n"
    if isinstance(node, ast.ClassDef):
        renamed = _Renamed(node.name).visit(ast.parse(ast.unparse(node)))
        return rest + ast.unparse(renamed) + "\n"
    statements = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    lines = [line for n in statements for line in ast.unparse(n).splitlines()]
    head = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()", ""]
    head.append(f"    def forward({', '.join(('self', *arguments))}):")
    return rest + "\n".join([*head, *("        " + line for line in lines)]) + "\n"


def _is_plain_import(node: ast.stmt) -> bool:
    return ast.unparse(node) in _HEAD.splitlines() or getattr(node, "module", "") == "__future__"


class _Renamed(ast.NodeTransformer):
    """A class of another name becomes Model."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.name = "Model" if node.name == self._name else node.name
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = "Model" if node.id == self._name else node.id
        return node


def _arguments(node: ast.FunctionDef, given: Given) -> tuple[str, ...]:
    """The parameters that inputs fill: as many as `--inputs` names, else those without a default."""
    args = node.args
    if args.vararg or args.kwarg or any(default is None for default in args.kw_defaults):
        cause = f"{node.name} takes *args, **kwargs or keyword-only arguments"
        raise UserError(cause, "Wrap it in a function with plain parameters")
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    count = len(names) - len(args.defaults)
    if given.inputs:
        listed = ast.parse(f"[{given.inputs}]", mode="eval").body
        assert isinstance(listed, ast.List)
        is_open = any(isinstance(item, ast.Starred) for item in listed.elts)
        count = count if is_open else len(listed.elts)
    if not 0 < count <= len(names):
        raise UserError(f"{node.name} takes {len(names)} arguments, and {count} inputs are given", _INPUTS_CURE)
    return tuple(names[:count])


def _names(expression: str, option: str) -> list[str]:
    if not expression:
        return []
    try:
        tree = ast.parse(f"[{expression}]", mode="eval")
    except SyntaxError as error:
        cause = f"{option} {expression!r} does not parse: {error.msg}"
        raise UserError(cause, "Write Python, as torch.randn(64, 128)") from None
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


def find_file(place: str) -> Path:
    """A file, or that of a module on the import path; nothing is imported to find it.

    :raises UserError: there is none.
    """
    path = Path(place).expanduser()
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise UserError(f"there is no file {place}", "Give a Python file, or package.module:name")
        return path
    parts = place.split(".")
    for base in (Path.cwd(), *map(Path, sys.path)):
        for found in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
            if place and found.is_file():
                return found
    raise UserError(f"there is no file or module {place!r}", "Give a Python file, or package.module:name")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}", "Give a Python file") from None
