"""Rows of a data set, JSONL, Parquet or of the hub: KernelBook, Dr. Kernel's RL data, KernelBench, and others like
them.

The source is in `python_code`, `pytorch_code`, `original_python_code`, `code` or `reward_model.ground_truth`, the
module's name in `entry_point`, `extra_info.entry_point` or `module_name`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.importing.found import Found, LeftOut, as_model, parsed, stem_of
from kbrl_async.kernels.problems.contract import bound_names
from kbrl_async.kernels.problems.sources import hub

SOURCES = ("python_code", "pytorch_code", "original_python_code", "code", "reward_model.ground_truth", "ground_truth")
ENTRIES = ("entry_point", "extra_info.entry_point", "module_name")
HELPER = re.compile(r"^from _paritybench_helpers import .*\n", re.MULTILINE)
HELPERS = """

class _mock_config(dict):
    __getattr__ = dict.get


def _mock_layer(rows=None, columns=None, *_, **words):
    return torch.nn.Linear(rows, columns, **words) if rows and columns else torch.nn.Identity()


"""
"""KernelBook's rows import helpers of the tool that found them: settings by name, and some layer."""
LICENSES = ("license", "licenses", "extra_info.license")
ORIGINS = ("repo_link", "repo_name", "extra_info.repo_name")
NAMES = ("name", "uuid", "extra_info.uuid", "extra_info.index", "id")
ENDINGS = (".jsonl", ".parquet")
HUB = {"kernelbook": "GPUMODE/KernelBook", "drkernel": "hkust-nlp/drkernel-rl-data"}
"""Short names of data sets there."""
BATCH = 256


def knows(place: Path) -> bool:
    return any(True for _ in _files(place))


def read(place: Path) -> Iterator[Found]:
    for path in _files(place):
        for number, row in enumerate(_parquet(path) if path.suffix == ".parquet" else _jsonl(path)):
            origin = f"{path.name}:{number + 1}"
            if row is None:
                yield Found(stem_of(f"{path.stem}_{number}"), "", origin=origin, left_out="a line is not JSON")
            else:
                yield _found(row, f"{path.stem}_{number:06d}", origin)


def read_hub(name: str) -> Iterator[Found]:
    """Every row of a data set of the hub.

    :raises MissingTool: the library for it is not installed.
    :raises ProblemError: it can't be reached.
    """
    for split, rows in hub.splits_of(name).items():
        for number, row in enumerate(rows):
            yield _found(row, f"{split}_{number:06d}", f"{name} {split} {number + 1}")


def _files(place: Path) -> Iterator[Path]:
    if place.is_file() and place.suffix in ENDINGS:
        yield place
    elif place.is_dir():
        yield from (path for ending in ENDINGS for path in sorted(place.rglob(f"*{ending}")))


def _jsonl(path: Path) -> Iterator[Mapping[str, Any] | None]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield row if isinstance(row, dict) else None


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    """In batches, so that a file of any size takes little memory."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        cure = "Install it with pip install 'kbrl-async[retrieval]', or give JSONL"
        raise MissingTool(f"{path} needs pyarrow, which is not installed", cure) from None
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=BATCH):
        yield from batch.to_pylist()


def _found(row: Mapping[str, Any], fallback: str, origin: str) -> Found:
    name = stem_of(str(_first(row, NAMES) or fallback))
    licensed, level = _first(row, LICENSES), row.get("level")
    said = ", ".join(map(str, licensed)) if isinstance(licensed, list) else str(licensed or "")
    level = level if isinstance(level, int) and level > 0 else 1
    origin = str(_first(row, ORIGINS) or origin)
    try:
        return Found(name, _source(row), level, origin, said)
    except LeftOut as reason:
        return Found(name, "", level, origin, said, str(reason))


def _source(row: Mapping[str, Any]) -> str:
    source = _first(row, SOURCES)
    if not isinstance(source, str):
        raise LeftOut("no source in it")
    entry = _first(row, ENTRIES)
    source = HELPER.sub(HELPERS, source, count=1)
    source = HELPER.sub("", source)
    body = parsed(source)
    source = as_model(source, entry) if isinstance(entry, str) and entry else source
    if "get_init_inputs" not in bound_names(body):
        source = source.rstrip() + "\n\n\ndef get_init_inputs():\n    return []\n"
    return source


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of these columns that is there; `a.b` is a field of a column, which may be text of JSON."""
    for name in names:
        found: Any = row
        for part in name.split("."):
            found = _mapping(found).get(part)
        if found not in (None, "", []):
            return found
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    """Empty for what is none; Parquet files of verl keep some as text."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}
