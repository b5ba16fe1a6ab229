"""Problems as files: folders `level{L}/{NN}_{name}.py` in the KernelBench layout, and single files.

::

    suite ─▶ the project's own      kernelbench ─▶ KERNELBENCH_ROOT, or found      a checkout ─▶ its KernelBench/level*/
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import yaml

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems.contract import parse_problem
from kbrl_async.kernels.problems.declared import KEYS, rendered
from protocols.records import Problem

SUITE = Path(__file__).parents[1] / "suite"
ROOT_VARIABLE = "KERNELBENCH_ROOT"
CHECKOUT = "KernelBench"
INDEX = "index.toml"
PROJECT = Path(__file__).parents[4]


def suite(shapes: str) -> Path:
    """The project's own suite."""
    return SUITE


def kernelbench(shapes: str) -> Path:
    """The checkout that the environment names, or one beside us.

    :raises ProblemError: there is none.
    """
    found = kernelbench_root(os.environ)
    if not found:
        cure = f"Set {ROOT_VARIABLE} to a KernelBench checkout, clone it beside this folder, or name its folder"
        raise ProblemError(f"problems=kernelbench needs {ROOT_VARIABLE}", cure)
    return Path(found)


def kernelbench_root(environment: MutableMapping[str, str]) -> str:
    """What `KERNELBENCH_ROOT` says, else a checkout in this folder, beside it or beside this project; empty: none.

    One that is found is told once, and put into `environment` for the processes that we start.
    """
    if given := environment.get(ROOT_VARIABLE):
        return given
    for folder in (Path.cwd(), Path.cwd().parent, PROJECT.parent):
        checkout = folder / CHECKOUT
        if any(root_of(checkout).glob("level*/*.py")):
            print(f"KernelBench: found in {checkout}; {ROOT_VARIABLE} names another one", file=sys.stderr)
            environment[ROOT_VARIABLE] = str(checkout)
            return str(checkout)
    return ""


def root_of(path: Path) -> Path:
    """Where a folder's levels are: in it, or of a checkout in its folder of problems."""
    inner = path / "KernelBench"
    return inner if not any(path.glob("level*/*.py")) and any(inner.glob("level*/*.py")) else path


def load_folder(folder: Path, *, shapes: str = "cpu") -> list[Problem]:
    """Every `level*/*.py` below `folder`; `index.toml` there may give `difficulty` and `split` by problem id."""
    if not folder.is_dir():
        raise ProblemError(f"{folder} is no folder", "Give a folder with level1/, level2/ … or one problem file")
    index = _read_index(folder / INDEX)
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
    return parse_problem(
        path.read_text() + _beside(path), problem_id, level=level, origin=str(path), shapes=shapes, **facts
    )


def _beside(path: Path) -> str:
    """What `NAME.yaml` or `NAME.json` says of `NAME.py`, or `problem.yaml` of the only problem of a folder, as the
    constants that stand for it. A JSON file of other data, as problems bring for their inputs, says nothing.

    :raises ProblemError: it does not parse, or has a key that is none of ours.
    """
    own, folders = (_first_of(path.parent, stem) for stem in (path.stem, "problem"))
    file = own or (folders if folders is not None and len(list(path.parent.glob("*.py"))) == 1 else None)
    if file is None:
        return ""
    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        if file.suffix == ".json":
            return ""
        raise ProblemError(
            f"{file} does not parse: {error}".replace("\n", " "), "Mend the file or take it out"
        ) from None
    if not isinstance(keys, dict):
        raise ProblemError(f"{file} holds no keys", f"Write {', '.join(k.lower() for k in KEYS[:3])} …, or take it out")
    return rendered(keys, str(file))


def _first_of(folder: Path, stem: str) -> Path | None:
    files = (folder / f"{stem}{suffix}" for suffix in (".yaml", ".yml", ".json"))
    return next((file for file in files if file.is_file()), None)


def _read_index(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ProblemError(f"{path} does not parse: {error}", "Mend the file or take it out") from None


def _natural(path: Path) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
