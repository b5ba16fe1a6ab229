"""What the tests of this folder make their indexes from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.lab.indexing import IndexOptions, build_index
from kbrl_async.rollouts.retrieval import Entry, Manifest, SourceOptions, open_source
from kbrl_async.rollouts.retrieval.corpora import CorpusSource
from kbrl_async.rollouts.retrieval.entries import Skip

MODULE = """import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        {body}
        return x


def get_inputs():
    return [torch.randn(8, 8)]


def get_init_inputs():
    return []
"""


def module(*statements: str) -> str:
    return MODULE.replace("{body}", "\n        ".join(statements))


def entry(number: int, reference: str, **changes: Any) -> Entry:
    made = Entry(f"test:{number}", "test", reference, f"class ModelNew: pass  # {number}\n", "c")
    return msgspec.structs.replace(made, **changes)


def source(rows: Iterable[Entry | Skip], name: str = "test") -> CorpusSource:
    listed = list(rows)
    fingerprint = str(hash(tuple(row.uid if isinstance(row, Entry) else row.reason for row in listed)))
    return CorpusSource(name, "test", fingerprint, lambda: iter(listed))


def build(folder: Path, rows: Iterable[Entry | Skip], **options: Any) -> Manifest:
    return build_index([source(rows)], folder, IndexOptions(**options))


def open_file(path: Path, **options: Any) -> CorpusSource:
    return open_source(str(path), SourceOptions(**options), lambda setting: {})


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
