"""Examples in folders: kernels that somebody wrote, and the verified kernels of our own runs.

A folder of kernels holds, in any depth, files with both `class Model` and `class ModelNew`, or pairs `NAME.py` and
`NAME_kernel.py`. A run folder holds `kernels/L1_01_tanh.py`, the fastest verified kernel of each problem; its
references are the problems that the run was given.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from kbrl_async.errors import UserError
from kbrl_async.kernels.backends import guess_backend
from kbrl_async.rollouts.retrieval.entries import MAX_KERNEL, MAX_REFERENCE, Entry, Skip, digest

FOLDER, RUN = "folder", "run"
SUFFIX = "_kernel"
_MODEL = re.compile(r"^class\s+Model\b", re.MULTILINE)
_MODEL_NEW = re.compile(r"^class\s+ModelNew\b", re.MULTILINE)
_RUN_KERNEL = re.compile(r"(L\d+)_(.+)")


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "kernels").is_dir()


def fingerprint(folder: Path) -> str:
    """Changes with the name, size or time of any file that would be read."""
    found = hashlib.sha256()
    for path in [*sorted(folder.rglob("*.py")), folder / "summary.json"]:
        if path.is_file():
            facts = path.stat()
            found.update(
                f"{path.relative_to(folder)}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode("utf-8", "replace")
            )
    return found.hexdigest()


def folder_entries(folder: Path) -> Iterator[Entry | Skip]:
    """One per file that is, or has, a kernel."""
    for path in sorted(folder.rglob("*.py")):
        if path.stem.endswith(SUFFIX):
            continue
        yield _guarded(folder, path)


def _guarded(folder: Path, path: Path) -> Entry | Skip:
    try:
        return _folder_entry(folder, path)
    except Skip as skip:
        return skip


def _folder_entry(folder: Path, path: Path) -> Entry:
    reference = _text(path)
    beside = path.with_name(f"{path.stem}{SUFFIX}.py")
    if beside.is_file():
        kernel = _text(beside)
    elif _MODEL_NEW.search(reference) and _MODEL.search(reference):
        # one file, two classes: the reference is what the rules compare, the file is what is shown
        kernel, reference = reference, reference[: _cut(reference)]
    else:
        raise Skip("no kernel beside it")
    return Entry(
        uid=f"{FOLDER}:{digest(reference, kernel)}",
        corpus=FOLDER,
        reference=reference,
        kernel=kernel,
        backend=guess_backend(kernel, "other"),
        origin=str(path.relative_to(folder)),
    )


def _cut(source: str) -> int:
    """Where `ModelNew` begins; `Model` must stand above it."""
    found = _MODEL_NEW.search(source)
    assert found is not None
    if not _MODEL.search(source[: found.start()]):
        raise Skip("ModelNew stands above Model")
    return found.start()


def run_entries(folder: Path, problems: Mapping[str, str]) -> Iterator[Entry | Skip]:
    """The verified kernels of a run. `problems`: source by problem id."""
    backend, speedups = _backend(folder), _speedups(folder)
    for path in sorted((folder / "kernels").glob("*.py")):
        match = _RUN_KERNEL.fullmatch(path.stem)
        problem_id = f"{match.group(1)}/{match.group(2)}" if match else ""
        if problem_id not in problems:
            yield Skip("no problem of that name")
            continue
        try:
            kernel = _text(path)
        except Skip as skip:
            yield skip
            continue
        yield Entry(
            uid=f"{RUN}:{digest(problem_id, kernel)}",
            corpus=RUN,
            reference=problems[problem_id],
            kernel=kernel,
            backend=backend,
            problem_id=problem_id,
            level=int(problem_id[1 : problem_id.index("/")]),
            speedup=speedups.get(path.name),
            verified=True,
            origin=folder.name,
        )


def run_problems(folder: Path) -> str:
    """The `problems` setting of a run: empty for the project's suite."""
    return str(_settings(folder).get("problems") or "")


def _backend(folder: Path) -> str:
    return str(_settings(folder).get("backend") or "c")


def _settings(folder: Path) -> Mapping[str, object]:
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / 'config.yaml'} can't be read", "Give the folder of a run") from error
    return settings if isinstance(settings, dict) else {}


def _speedups(folder: Path) -> dict[str, float]:
    """By kernel file, the lower end of the interval; a run that has not ended has none yet."""
    try:
        best = json.loads((folder / "summary.json").read_text())["best_kernels"]
        return {Path(kernel["file"]).name: float(kernel["lo"]) for kernel in best if kernel["file"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _text(path: Path) -> str:
    if path.stat().st_size > 4 * max(MAX_KERNEL, MAX_REFERENCE):
        raise Skip("kernel is too long")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Skip("not UTF-8") from None
