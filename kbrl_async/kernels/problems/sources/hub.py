"""Problems of a data set on the hub, such as `ScalingIntelligence/KernelBench`: rows with `code`, `level`, `name`.

The library `datasets` is optional; what was downloaded once is found again without a network.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kbrl_async.errors import MissingTool, ProblemError
from kbrl_async.kernels.problems.contract import parse_problem
from protocols.records import Problem

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SPLIT = re.compile(r"level_(\d+)")


def looks_like_name(source: str) -> bool:
    """`owner/name`; whoever has such a folder means that."""
    return _NAME.fullmatch(source) is not None


Splits = Mapping[str, Iterable[Mapping[str, Any]]]


def load_hub(name: str) -> list[Problem]:
    """All problems of all levels, ordered by level and number.

    :raises MissingTool: `datasets` is not installed.
    :raises ProblemError: it can't be reached, or has other columns.
    """
    return problems_of(splits_of(name), name)


def splits_of(name: str) -> Splits:
    """A data set's rows, by split; they are read from its file as they are asked for.

    :raises MissingTool: `datasets` is not installed.
    :raises ProblemError: it can't be reached.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        cure = "Install it with pip install 'kbrl-async[retrieval]', or give a folder"
        raise MissingTool(f"{name} is a data set of the hub, and the library datasets is not installed", cure) from None
    try:
        found: Splits = datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        cure = "Check name and network, or clone the repository and set KERNELBENCH_ROOT, or give the folder"
        raise ProblemError(f"there is no folder {name}, and the hub does not give it: {first[:200]}", cure) from None
    return found


def problems_of(splits: Splits, name: str) -> list[Problem]:
    """The rows of each split; a split `level_2` tells the level of rows that have none."""
    problems = []
    for split, rows in splits.items():
        match = _SPLIT.fullmatch(split)
        for row in rows:
            if not isinstance(row.get("code"), str):
                raise ProblemError(f"{name} has rows without code", "Give a data set with columns code, level, name")
            level = int(row.get("level") or (match[1] if match else 0))
            stem = _stem(row)
            origin = f"{name} {split} {stem}"
            problems.append(parse_problem(str(row["code"]), f"L{level}/{stem}", level=level, origin=origin))
    return sorted(problems, key=lambda problem: (problem.level, _number(problem.name)))


def _stem(row: Mapping[str, Any]) -> str:
    """The file's name with its number in front, as in the repository."""
    name = str(row.get("name") or "problem").removesuffix(".py")
    number = row.get("problem_id")
    return name if number is None or re.match(rf"0*{number}_", name) else f"{number}_{name}"


def _number(name: str) -> int:
    match = re.match(r"\d+", name)
    return int(match[0]) if match else 0
