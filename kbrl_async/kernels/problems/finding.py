"""From what a person types to one problem: a file, an id, or a part of an id that fits only one.

`L1/13_softmax`, `level1/13_softmax.py`, `L1/13`, `1/13`, `13_softmax` and `softmax` all find the same problem.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from kbrl_async.errors import UserError
from kbrl_async.kernels.problems.loading import load_file, load_problems
from protocols.records import Problem

_NEAREST = 3


def find_problem(wanted: str, source: str = "", *, shapes: str = "cpu") -> Problem:
    """`wanted` is a problem file, or the id of a problem of `source` (a folder; empty: the project's own suite).

    :raises UserError: no such file, or no such problem; names the nearest.
    :raises ProblemError: the file breaks the contract.
    """
    path = Path(wanted).expanduser()
    if path.is_file():
        return load_file(path, shapes=shapes)
    if path.suffix == ".py" and not re.match(r"^(L|level)?\d+/", wanted):
        raise UserError(f"there is no problem file {wanted}", "Give a file, or an id that 'kbrl problems list' shows")
    return choose(wanted, load_problems(source, shapes=shapes))


def choose(wanted: str, problems: Sequence[Problem]) -> Problem:
    """The one of `problems` that `wanted` names.

    :raises UserError: none or several do.
    """
    key = _key(wanted)
    for fits in (_is_id, _is_number, _is_name, _is_part):
        found = [problem for problem in problems if fits(problem, key)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(problem.problem_id for problem in found[:_NEAREST])
            raise UserError(f"{wanted!r} names {len(found)} problems", f"Say which: {names} …")
    ids = [problem.problem_id for problem in problems]
    raise UserError(f"there is no problem {wanted!r}", f"Nearest: {', '.join(nearest(wanted, ids))}")


def nearest(wanted: str, ids: Sequence[str]) -> list[str]:
    """The ids most like `wanted`, best first."""
    key = _key(wanted)
    by_text = {form: id_ for id_ in ids for form in (re.sub(r"^l\d+/\d+_", "", _key(id_)), _key(id_))}
    close = difflib.get_close_matches(key, by_text, n=2 * _NEAREST, cutoff=0.0)
    return list(dict.fromkeys(by_text[form] for form in close))[:_NEAREST]


def _key(text: str) -> str:
    return re.sub(r"^(?:level|l)?(\d+)/", r"l\1/", text.strip().lower().removesuffix(".py"))


def _is_id(problem: Problem, key: str) -> bool:
    return _key(problem.problem_id) == key


def _is_number(problem: Problem, key: str) -> bool:
    match = re.fullmatch(r"l(\d+)/0*(\d+)", key)
    return (
        match is not None and _key(problem.problem_id).startswith(f"l{match[1]}/") and number(problem) == int(match[2])
    )


def _is_name(problem: Problem, key: str) -> bool:
    name = problem.name.lower()
    return key in (name, re.sub(r"^\d+_", "", name))


def _is_part(problem: Problem, key: str) -> bool:
    return bool(key) and "/" not in key and not key.isdigit() and key in problem.name.lower()


def number(problem: Problem) -> int | None:
    """KernelBench's `problem_id`: the number at the start of the file's name."""
    match = re.match(r"(\d+)_", problem.name)
    return int(match[1]) if match else None
