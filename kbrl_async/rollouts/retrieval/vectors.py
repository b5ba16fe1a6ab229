"""The FAISS side: exact below a hundred thousand rows, inverted lists above; on disk and memory-mapped.

Inner products of unit vectors: what comes back is a cosine in both kinds, and the vectors of hits can be read back,
which the leak rules and the diversity of the ranking need.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kbrl_async.errors import MissingTool, UserError
from kbrl_async.rollouts.retrieval.embedders import Vectors


@functools.cache
def _faiss() -> Any:
    """Imported when an index is made or read: whoever only reads modules (the small policy's corpus) needs it not."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise MissingTool("FAISS is not installed", "pip install faiss-cpu") from error


EXACT_BELOW = 100_000
EXACT, LISTS = "exact", "ivf"
TRAIN_PER_LIST = 40
PROBED = 1 / 12
"""Share of the lists that a search looks into; at least 16."""


def kind_for(count: int, exact_below: int = EXACT_BELOW) -> str:
    return EXACT if count < exact_below else LISTS


def write(path: Path, kind: str, dimension: int, count: int, parts: Callable[[], Iterator[Vectors]]) -> None:
    """Writes the index of all `parts`, which are asked for once to train lists and once to fill them."""
    index = _faiss().IndexFlatIP(dimension) if kind == EXACT else _trained(dimension, count, parts)
    for part in parts():
        index.add(np.ascontiguousarray(part))
    _faiss().write_index(index, str(path))


def _trained(dimension: int, count: int, parts: Callable[[], Iterator[Vectors]]) -> Any:
    lists = max(1, min(int(4 * math.sqrt(count)), count // TRAIN_PER_LIST))
    wanted = min(count, lists * TRAIN_PER_LIST)
    # every part gives its share, so that no source is unknown to the lists
    sample = np.concatenate([part[:: max(1, count // wanted)] for part in parts()])
    index = _faiss().IndexIVFFlat(_faiss().IndexFlatIP(dimension), dimension, lists, _faiss().METRIC_INNER_PRODUCT)
    index.cp.seed = 0
    index.train(np.ascontiguousarray(sample))
    return index


class VectorIndex:
    """An index file, opened for reading."""

    def __init__(self, path: Path, kind: str) -> None:
        try:
            self._index = cast(Any, _faiss().read_index(str(path), _mapped(kind)))
        except RuntimeError as error:
            raise UserError(f"{path} is no FAISS index", "Build the index again") from error
        if kind == LISTS:
            self._index.make_direct_map()
            self._index.nprobe = max(16, int(self._index.nlist * PROBED))
        self.dimension, self.count = int(self._index.d), int(self._index.ntotal)

    def search(self, query: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and similarities, best first; fewer than `count` where there are no more."""
        scores, rows = self._index.search(query.reshape(1, -1), min(count, self.count))
        found = rows[0] >= 0
        return rows[0][found], scores[0][found]

    def vectors(self, rows: NDArray[np.int64]) -> Vectors:
        out = np.empty((len(rows), self.dimension), np.float32)
        for place, row in enumerate(rows):
            self._index.reconstruct(int(row), out[place])
        return out


def _mapped(kind: str) -> int:
    """Flags that map the file instead of reading it; older versions of FAISS map inverted lists only."""
    if kind == EXACT:
        return int(getattr(_faiss(), "IO_FLAG_MMAP_IFC", 0))
    return int(_faiss().IO_FLAG_MMAP)
