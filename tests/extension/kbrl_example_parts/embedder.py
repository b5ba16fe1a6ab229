"""A retriever's embedder: `kbrl index build … --model kbrl_example_parts.embedder:Words`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kbrl_async.rollouts.retrieval.embedders import Passage, Vectors

_WORD = re.compile(r"[A-Za-z_]+")


class Words:
    """Words of the source, hashed into a vector of unit length."""

    name = "kbrl_example_parts.embedder:Words"
    dimension = 128
    near_copy = 0.95

    @classmethod
    def open(cls, folder: Path) -> Words:
        return cls()

    def fit(self, passages: Iterable[Passage]) -> None:
        """Learns nothing."""

    def embed(self, passages: Sequence[Passage]) -> Vectors:
        rows = np.zeros((len(passages), self.dimension), np.float32)
        for row, passage in zip(rows, passages, strict=True):
            for word in _WORD.findall(passage.source):
                row[zlib.crc32(word.encode()) % self.dimension] += 1
            row /= max(1.0, float(np.linalg.norm(row)))
        return rows

    def save(self, folder: Path) -> None:
        """Has nothing to write."""
