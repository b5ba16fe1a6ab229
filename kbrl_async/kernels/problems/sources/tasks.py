"""Problems from task files: one JSON object a line with `id, instruction, pytorch_code, test_inputs, difficulty`.

`pytorch_code` may hold the whole contract (`Model`, `get_inputs`, `get_init_inputs`), a module of another name, or one
function; what is missing is written around it. `test_inputs` gives the inputs where `get_inputs` does not: a list (or
a mapping by name) of shapes, of `{"shape": …, "dtype": …}`, or of plain numbers; or Python that evaluates to them. A
list of such lists or mappings is several sets of inputs: each is a workload of the problem.

Nothing here runs a task.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems.contract import bound_names, parse_problem
from protocols.records import Problem

DIFFICULTIES = {"trivial": 0.0, "easy": 0.2, "medium": 0.5, "hard": 0.8, "very hard": 1.0, "expert": 1.0}
LEVEL, LEVELS = 1, 4
"""Of tasks that name none, and how many there are."""
_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "long", "uint8"})
_PREAMBLE = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"


def load_tasks(path: Path) -> list[Problem]:
    """All tasks of a file, in order. Raises `ProblemError` with the line of the first that is wrong."""
    problems: dict[str, Problem] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ProblemError(f"{origin} is not JSON: {error}", "Write one object a line") from None
        problem = task_problem(row, number, origin)
        if problem.problem_id in problems:
            raise ProblemError(f"{origin} has the id {problem.problem_id} of an earlier line", "Give each its own id")
        problems[problem.problem_id] = problem
    if not problems:
        raise ProblemError(f"{path} holds no task", "Write one JSON object a line")
    return list(problems.values())


def task_problem(row: Any, number: int, origin: str) -> Problem:
    """One task as a problem. Its level is `level` where the task has one, else a difficulty of 2, 3 or 4, else 1."""
    if not isinstance(row, dict) or not isinstance(row.get("pytorch_code"), str):
        raise ProblemError(f"{origin} has no pytorch_code", "A task has id, instruction, pytorch_code, test_inputs")
    given = row.get("difficulty")
    implied = None if "level" in row else _level_of(given)
    level = row.get("level", implied or LEVEL)
    if not isinstance(level, int):
        raise ProblemError(f"{origin}: level {level!r} is no number", "Write a whole number, or leave it out")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(row.get("id", number))).strip("_") or str(number)
    source = _comment(row.get("instruction")) + _source(row, origin)
    difficulty = _difficulty(given, origin) if implied is None else (implied - 1) / (LEVELS - 1)
    split = str(row.get("split", "train"))
    return parse_problem(source, f"L{level}/{name}", level=level, origin=origin, difficulty=difficulty, split=split)


def _level_of(difficulty: Any) -> int | None:
    """Whole numbers from 1 to 4 are KernelBench's levels where no level is given; None: it is none of them."""
    is_level = isinstance(difficulty, int) and not isinstance(difficulty, bool) and 1 <= difficulty <= LEVELS
    return difficulty if is_level else None


def _comment(instruction: Any) -> str:
    """The instruction as a comment on top, where a policy reads it with the problem."""
    lines = str(instruction).strip().splitlines() if instruction else []
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _difficulty(value: Any, origin: str) -> float:
    """A word, a share, or points of ten."""
    if value is None:
        return 0.5
    if isinstance(value, str) and value.strip().lower() in DIFFICULTIES:
        return DIFFICULTIES[value.strip().lower()]
    try:
        number = float(value)
    except (TypeError, ValueError):
        words = ", ".join(DIFFICULTIES)
        raise ProblemError(f"{origin}: difficulty {value!r} is unknown", f"Write 0 … 1, 1 … 10, or {words}") from None
    return min(1.0, max(0.0, number if number <= 1 else number / 10))


def _source(row: Mapping[str, Any], origin: str) -> str:
    code = str(row["pytorch_code"]).strip() + "\n"
    try:
        body = ast.parse(code).body
    except SyntaxError as error:
        cause = f"{origin}: pytorch_code does not parse, line {error.lineno}: {error.msg}"
        raise ProblemError(cause, "Mend the task or take it out") from None
    names = bound_names(body)
    if "torch" not in _imported(body):
        code = _PREAMBLE + "\n" + code
    if "Model" not in names:
        code += _model(body, origin)
    if not names & {"get_inputs", "get_input_groups"}:
        code += _inputs(row.get("test_inputs"), origin)
    if "get_init_inputs" not in names:
        code += "\n\ndef get_init_inputs():\n    return []\n"
    return code


def _imported(body: list[ast.stmt]) -> set[str]:
    return {alias.asname or alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}


def _model(body: list[ast.stmt], origin: str) -> str:
    """The last module of the code under the contract's name, or a module around its last function."""
    modules = [node.name for node in body if isinstance(node, ast.ClassDef) and _is_module(node)]
    if modules:
        return f"\n\nclass Model({modules[-1]}):\n    pass\n"
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("get_")]
    if not functions:
        raise ProblemError(f"{origin}: pytorch_code defines no Model, module or function", "Define one of them")
    call = f"{functions[-1]}(*inputs)"
    return f"\n\nclass Model(torch.nn.Module):\n    def forward(self, *inputs):\n        return {call}\n"


def _is_module(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Module") for base in node.bases)


def _inputs(given: Any, origin: str) -> str:
    if given is None or given == []:
        cure = "Add test_inputs, such as [[16, 256]], or get_inputs() in the code"
        raise ProblemError(f"{origin} says nothing about its inputs", cure)
    if isinstance(given, str):
        return _written_inputs(given, origin)
    if isinstance(given, list) and all(map(_is_set, given)):
        groups = ",\n        ".join(f"[{_tensors(one, origin)}]" for one in given)
        return f"\n\ndef get_input_groups():\n    return [\n        {groups},\n    ]\n"
    return f"\n\ndef get_inputs():\n    return [{_tensors(given, origin)}]\n"


def _is_set(item: Any) -> bool:
    """All inputs of one call, not one of them: a list of more than numbers, or a mapping by their names."""
    if isinstance(item, dict):
        return "shape" not in item
    return isinstance(item, list) and any(isinstance(part, list | dict) for part in item)


def _tensors(given: Any, origin: str) -> str:
    values = list(given.values()) if isinstance(given, dict) and "shape" not in given else given
    listed = [values] if isinstance(values, dict) or _is_shape(values) else values
    if not isinstance(listed, list):
        raise ProblemError(f"{origin}: test_inputs is no list", "Write shapes, such as [[16, 256], [256]]")
    return ", ".join(_tensor(item, origin) for item in listed)


def _written_inputs(text: str, origin: str) -> str:
    """Python: an expression, or the whole function."""
    try:
        if "def get_inputs" in text:
            ast.parse(text)
            return f"\n\n{text.strip()}\n"
        ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        cause = f"{origin}: test_inputs does not parse: {error.msg}"
        raise ProblemError(cause, "Write an expression such as [torch.randn(16, 256)]") from None
    return f"\n\ndef get_inputs():\n    return list({text.strip()})\n"


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, int) for n in value)


def _tensor(item: Any, origin: str) -> str:
    if _is_shape(item):
        return f"torch.randn({', '.join(map(str, item))})"
    if isinstance(item, dict) and _is_shape(item.get("shape")):
        shape = ", ".join(map(str, item["shape"]))
        dtype = str(item.get("dtype", "float32")).removeprefix("torch.")
        if not re.fullmatch(r"[a-z]+\d*", dtype):
            raise ProblemError(f"{origin}: {dtype!r} is no dtype", "Write one of torch's, such as float32")
        if dtype == "bool":
            return f"torch.rand({shape}) > 0.5"
        high = int(item.get("high", 8))
        return (
            f"torch.randint(0, {high}, ({shape},), dtype=torch.{dtype})"
            if dtype in _INTEGERS
            else f"torch.randn({shape}).to(torch.{dtype})"
        )
    if isinstance(item, int | float) and not isinstance(item, bool):
        return repr(item)
    raise ProblemError(f"{origin}: test_inputs holds {item!r}", "Write shapes, {'shape': …, 'dtype': …} or numbers")
