"""Records of files, each with its place: JSONL by line, JSON by element, Parquet by row.

Invariant: one result per line, element or row that holds something, in order; what can't be read is a `FormatError`
at its place and not the end of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kbrl_async.errors import MissingTool, UserError
from kbrl_async.runs.demonstrations.formats import FormatError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")

Placed = tuple[str, Any]
"""`file:line` and the record, or the FormatError in its place."""


def files_of(path: Path) -> list[Path]:
    """The file itself, or all files of a folder that can be read, in order of their names.

    :raises UserError: there is nothing of the kind.
    """
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{path} is no file of demonstrations", f"Known endings: {', '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir():
        raise UserError(f"there is no file of demonstrations {path}", "Give a file, a folder of files, or a run")
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not found:
        raise UserError(f"{path} holds no demonstrations", f"Known endings: {', '.join(SUFFIXES)}")
    return found


def records(path: Path) -> Iterator[Placed]:
    """Every record of a file. The place of a JSON element or a row is its number, from 1."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _parquet(path)
    elif kind == ".json":
        yield from _json(path)
    else:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[Placed]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _parse(line)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        return FormatError(f"not UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return FormatError(f"no JSON: {error}")


def _json(path: Path) -> Iterator[Placed]:
    """A list of records, an object whose `data` (or `train`) is one, or lines after all."""
    content = path.read_bytes()
    whole = _parse(content)
    if isinstance(whole, FormatError):
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) > 1 and not isinstance(_parse(lines[0]), FormatError):
            yield from _lines(path)
        else:
            yield f"{path}:1", whole
        return
    if isinstance(whole, dict):
        whole = next((whole[key] for key in ("data", "train") if isinstance(whole.get(key), list)), [whole])
    for number, record in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield f"{path}:{number}", record


def _parquet(path: Path) -> Iterator[Placed]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        cure = "Install it: pip install pyarrow; or convert the file to JSONL"
        raise MissingTool(f"{path} is Parquet, and pyarrow is not installed", cure) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", _without_nulls(record)
    except (OSError, ValueError) as error:
        yield f"{path}:{number + 1}", FormatError(f"no readable Parquet: {str(error).splitlines()[0]}")


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Parquet has every column in every row; a null one is not there."""
    return {key: value for key, value in record.items() if value is not None}
