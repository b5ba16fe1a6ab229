"""Finds and reads problems: folders `level{L}/{NN}_{name}.py`, single files, task files, data sets of the hub.

::

    ""  ─▶ the project's own suite          kernelbench ─▶ KERNELBENCH_ROOT        owner/name ─▶ the hub
    folder with level*/, or with KernelBench/level*/          file.py          tasks.jsonl

Everything is parsed, nothing is run.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems import audit_file
from kbrl_async.kernels.problems.contract import REQUIRED, parse_problem
from kbrl_async.kernels.problems.precision import in_precision
from kbrl_async.kernels.problems.sources import hub, tasks
from protocols.records import Problem

__all__ = ["REQUIRED", "load_file", "load_folder", "load_problems", "load_suite", "parse_problem"]

SUITE = Path(__file__).parent / "suite"
KERNELBENCH = "kernelbench"
ROOT_VARIABLE = "KERNELBENCH_ROOT"


def load_problems(
    source: str = "",
    *,
    levels: Iterable[int] = (),
    split: str | None = None,
    shapes: str = "cpu",
    precision: str = "fp32",
) -> list[Problem]:
    """The problems of `source`: empty for the project's own suite, else a folder, a file, a hub name or `kernelbench`.

    `levels` and `split` select; nothing selected is a `ProblemError`. What an audit of them says is in their `flags`.
    """
    problems, folder = _read(source, shapes)
    problems = audit_file.with_flags(problems, map(audit_file.read, audit_file.find(folder, shapes)))
    wanted = set(levels)
    chosen = [p for p in problems if (not wanted or p.level in wanted) and split in (None, p.split)]
    if not chosen:
        there = ", ".join(map(str, sorted({p.level for p in problems})))
        asked = f"level {sorted(wanted) or 'any'} and split {split or 'any'}"
        raise ProblemError(f"no problem in {folder or source or SUITE} has {asked}", f"It has level {there}")
    return [in_precision(problem, precision) for problem in chosen]


def _read(source: str, shapes: str) -> tuple[list[Problem], Path | None]:
    """All problems, and the folder whose audit belongs to them (None: the suite's own)."""
    if not source:
        return load_folder(SUITE, shapes=shapes), None
    path = root_folder(source, os.environ)
    if path.is_file():
        found = tasks.load_tasks(path) if path.suffix == ".jsonl" else [load_file(path, shapes=shapes)]
        return found, None if path.is_relative_to(SUITE) else path.parent
    if not path.exists() and hub.looks_like_name(source):
        return hub.load_hub(source), path
    return load_folder(path, shapes=shapes), None if path == SUITE else path


def root_folder(source: str, environment: Mapping[str, str]) -> Path:
    """The file or folder that `source` names: `kernelbench` is KERNELBENCH_ROOT, a checkout its folder of problems.

    :raises ProblemError: `kernelbench`, and the variable is not set.
    """
    if source == KERNELBENCH and not Path(source).exists():
        if not environment.get(ROOT_VARIABLE):
            cure = f"Set {ROOT_VARIABLE} to a KernelBench checkout, or name its folder"
            raise ProblemError(f"problems=kernelbench needs {ROOT_VARIABLE}", cure)
        source = environment[ROOT_VARIABLE]
    path = Path(source).expanduser()
    inner = path / "KernelBench"
    return inner if not any(path.glob("level*/*.py")) and any(inner.glob("level*/*.py")) else path


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


def _read_index(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ProblemError(f"{path} does not parse: {error}", "Mend the file or take it out") from None


def _natural(path: Path) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
