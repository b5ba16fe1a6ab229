"""Reads problems from wherever a setting says: folders, files, task files, data sets of the hub, a user's own source.

::

    ""  ─▶ suite      a path: folder with level*/, file.py, tasks.jsonl      owner/name ─▶ the hub
    suite, kernelbench, generated:N, package.module:object ─door─▶ source(shapes) ─▶ [Problem], or the path to read

Everything is parsed, nothing is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

from kbrl_async.errors import ProblemError, UserError
from kbrl_async.kernels.problems import audit_file
from kbrl_async.kernels.problems.contract import REQUIRED, parse_problem
from kbrl_async.kernels.problems.precision import in_precision
from kbrl_async.kernels.problems.sources import hub, tasks
from kbrl_async.kernels.problems.sources.folder import SUITE, load_file, load_folder, root_of
from kbrl_async.kernels.problems.split import Split, with_split
from kbrl_async.kernels.settings import PROBLEM_SOURCES
from protocols.records import Problem

__all__ = ["REQUIRED", "load_file", "load_folder", "load_problems", "load_suite", "parse_problem"]


def load_problems(
    source: str = "",
    *,
    levels: Iterable[int] = (),
    split: str | None = None,
    shapes: str = "cpu",
    precision: str = "fp32",
    heldout: Split | None = None,
) -> list[Problem]:
    """The problems of `source`: empty for the project's own suite, else a folder, a file, a hub name, or a name of the
    door of problem sources.

    `levels` and `split` select; nothing selected is a `ProblemError`. What an audit of them says is in their `flags`.
    `heldout` says what is held out where the source does not (None: a tenth of each level).
    """
    problems, folder = _read(source or "suite", shapes)
    problems = with_split(problems, heldout or Split())
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
    path = Path(source).expanduser()
    if not path.exists() and PROBLEM_SOURCES.knows(source):
        found = _from_door(source, shapes)
        if not isinstance(found, Path):
            return _checked(found, source), path
        path = found
    path = root_of(path)
    if path.is_file():
        problems = tasks.load_tasks(path) if path.suffix == ".jsonl" else [load_file(path, shapes=shapes)]
        return problems, None if path.is_relative_to(SUITE) else path.parent
    if not path.exists() and hub.looks_like_name(source):
        return hub.load_hub(source), path
    return load_folder(path, shapes=shapes), None if path == SUITE else path


def _from_door(source: str, shapes: str) -> object:
    """A name of ours may take a word: `generated:500`."""
    name, _, word = source.partition(":")
    if word and name in PROBLEM_SOURCES.ours:
        part = PROBLEM_SOURCES.load(name)
        if len(inspect.signature(part).parameters) < 2:
            raise UserError(f"problems={name} takes nothing behind its name, not {word!r}", f"Write problems={name}")
        return part(shapes, word)
    return PROBLEM_SOURCES.load(source)(shapes)


def _checked(found: object, source: str) -> list[Problem]:
    problems = list(found) if isinstance(found, Iterable) else []
    if not problems or not all(isinstance(problem, Problem) for problem in problems):
        raise ProblemError(f"{source} gave no problems", "Return problems.parse_problem(…) of each source, or a path")
    return problems


def load_suite(*, levels: Iterable[int] = (), split: str | None = None, shapes: str = "cpu") -> list[Problem]:
    """The project's own suite, in order."""
    return load_problems(levels=levels, split=split, shapes=shapes)
