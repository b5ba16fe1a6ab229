"""Reads problem files `level{L}/{NN}_{name}.py` that define `Model`, `get_inputs` and `get_init_inputs`.

A size line `rows = 512  # gpu: 16384` carries two shapes; `shapes="gpu"` takes the second. Files are parsed, not run.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kbrl_async.errors import ProblemError
from kbrl_async.problems import audit_file
from protocols.records import Problem

SUITE = Path(__file__).parent / "suite"
REQUIRED = ("Model", "get_inputs", "get_init_inputs")
SIZE_LINE = re.compile(r"^(\w+ = )(.+?)  # gpu: (.+)$", re.MULTILINE)


def load_problems(
    source: str = "", *, levels: Iterable[int] = (), split: str | None = None, shapes: str = "cpu"
) -> list[Problem]:
    """The problems of `source`: empty for the project's own suite, else a KernelBench folder or one file.

    `levels` and `split` select; nothing selected is a `ProblemError`. What an audit of them says is in their `flags`.
    """
    path = Path(source).expanduser() if source else SUITE
    problems = [load_file(path, shapes=shapes)] if path.is_file() else load_folder(path, shapes=shapes)
    folder = None if path == SUITE else path
    problems = audit_file.with_flags(problems, map(audit_file.read, audit_file.find(folder, shapes)))
    wanted = set(levels)
    chosen = [p for p in problems if (not wanted or p.level in wanted) and split in (None, p.split)]
    if not chosen:
        raise ProblemError(f"no problem in {path} has level {sorted(wanted) or 'any'} and split {split or 'any'}")
    return chosen


def load_suite(*, levels: Iterable[int] = (), split: str | None = None, shapes: str = "cpu") -> list[Problem]:
    """The project's own suite, in order."""
    return load_problems(levels=levels, split=split, shapes=shapes)


def load_folder(folder: Path, *, shapes: str = "cpu") -> list[Problem]:
    """Every `level*/*.py` below `folder`; `index.toml` there may give `difficulty` and `split` by problem id."""
    if not folder.is_dir():
        raise ProblemError(f"{folder} is no folder", "Give a folder with level1/, level2/ … or one problem file")
    index = _read_index(folder / "index.toml")
    paths = sorted(folder.glob("level*/*.py"), key=_natural)
    if not paths:
        raise ProblemError(f"{folder} holds no level*/*.py", "Point `problems` at a KernelBench folder")
    return [load_file(path, index=index, shapes=shapes) for path in paths]


def load_file(path: Path, *, index: dict[str, dict[str, Any]] | None = None, shapes: str = "cpu") -> Problem:
    """One problem file; its level is its folder's number, 0 where it has none."""
    match = re.search(r"level(\d+)$", path.parent.name)
    level = int(match.group(1)) if match else 0
    problem_id = f"L{level}/{path.stem}"
    facts = (index or {}).get(problem_id, {})
    return parse_problem(path.read_text(), problem_id, level=level, origin=str(path), shapes=shapes, **facts)


def parse_problem(
    source: str,
    problem_id: str,
    *,
    level: int = 0,
    origin: str = "",
    shapes: str = "cpu",
    difficulty: float = 0.5,
    split: str = "train",
) -> Problem:
    """Checks the contract statically and chooses the shapes. Raises `ProblemError` with file and line."""
    origin = origin or problem_id
    try:
        names = {getattr(node, "name", "") for node in ast.parse(source).body}
    except SyntaxError as error:
        raise ProblemError(
            f"{origin}:{error.lineno} does not parse: {error.msg}", "Mend the file or take it out"
        ) from None
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ProblemError(
            f"{origin} lacks {', '.join(missing)}", "A problem defines Model, get_inputs() and get_init_inputs()"
        )
    text = SIZE_LINE.sub(r"\1\3" if shapes == "gpu" else r"\1\2", source)
    return Problem(problem_id, level, problem_id.partition("/")[2], text, float(difficulty), split)


def _read_index(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ProblemError(f"{path} does not parse: {error}", "Mend the file or take it out") from None


def _natural(path: Path) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
