"""Rows of a data set: a local JSON-lines or Parquet file, or a name on the Hugging Face hub.

A row that can't be read is a `Skip` in its place, so that positions stay and a build can go on where it was. Fields are
taken with `text`, `number` and `flag`, which say what is wrong with a field instead of failing later.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kbrl_async.durable import file_sha256
from kbrl_async.errors import MissingTool, UserError
from kbrl_async.rollouts.retrieval.entries import Skip

Row = Mapping[str, Any]
MAX_LINE = 4_000_000
"""Bytes of one JSON line; what is longer holds no row that we would keep."""
EXTRA = "Install it with: pip install 'kbrl-async[retrieval]'"


def read_rows(place: str) -> Iterator[Row | Skip]:
    """The rows of a file, or of a data set on the hub, in a fixed order."""
    path = Path(place)
    if not path.exists():
        return _hub(place)
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".parquet": _parquet}
    if path.suffix not in readers:
        raise UserError(f"{path} is neither .jsonl nor .parquet", "Give a file of one of these kinds")
    return readers[path.suffix](path)


def fingerprint(place: str) -> str:
    """What tells a source that has changed: a file's content, or the name of a data set."""
    path = Path(place)
    if not path.is_file():
        return hashlib.sha256(place.encode()).hexdigest()
    return file_sha256(path)


def _json_lines(path: Path) -> Iterator[Row | Skip]:
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE):
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                    pass
                yield Skip("line is too long")
            elif line.strip():
                yield _parsed(line)


def _parsed(line: bytes) -> Row | Skip:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return Skip("not UTF-8")
    except (ValueError, RecursionError):
        return Skip("not JSON")
    return row if isinstance(row, dict) else Skip("not an object")


def _parquet(path: Path) -> Iterator[Row | Skip]:
    parquet = _optional("pyarrow.parquet", "pyarrow", str(path))
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        yield from batch.to_pylist()


def _hub(name: str) -> Iterator[Row | Skip]:
    if name.endswith((".jsonl", ".parquet")) or name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(f"{name} does not exist", "Give a file, a folder, or the name of a data set such as OWNER/NAME")
    datasets = _optional("datasets", "datasets", name)
    try:
        for split in datasets.get_dataset_split_names(name):
            for row in datasets.load_dataset(name, split=split, streaming=True):
                # the archive's splits are its levels
                yield {"Level_ID": split.rpartition("_")[2], **row}
    except (OSError, ValueError, RuntimeError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        cure = "The same command goes on where it stopped once the hub is reached; or give files of the data set"
        raise UserError(f"the hub does not give {name}: {first[:200]}", cure) from None


def _optional(module: str, package: str, wanted: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingTool(f"{wanted} needs the package {package}, which is not installed", EXTRA) from error


def text(row: Row, column: str) -> str:
    if column not in row:
        raise Skip(f"no column {column}")
    value = row[column]
    if value is None:
        raise Skip(f"{column} is null")
    if not isinstance(value, str):
        raise Skip(f"{column} is no text")
    return value


def optional_text(row: Row, column: str) -> str:
    """Empty where the column is missing; a list's words are joined."""
    value = row.get(column)
    if isinstance(value, list):
        return ", ".join(item for item in value if isinstance(item, str))[:200]
    return value[:200] if isinstance(value, str) else ""


def number(row: Row, column: str) -> float | None:
    """The column as a number; None where it holds none. Numbers come as text, too."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def flag(row: Row, column: str) -> bool:
    """True for true, 1 and "True"; all else is not."""
    value = row.get(column)
    return value is True or value == 1 or (isinstance(value, str) and value.strip().lower() in ("true", "1"))
