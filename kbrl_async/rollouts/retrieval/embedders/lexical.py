"""The offline embedder: weighted terms of a reference, hashed into a few hundred dimensions. Needs no download.

::

    operations ─ tf · idf ─ unit length ─ × √.6 ─┐
    grams      ─ tf · idf ─ unit length ─ × √.3 ─┼─▶ signed hashing ─▶ unit vector
    nodes      ─ tf · idf ─ unit length ─ × √.1 ─┘

So the similarity of two references is .6 that of what they compute, .3 that of how it is written and .1 that of the
shape of their syntax trees, however long they are. Signed hashing into D dimensions (Weinberger et al., 2009) keeps
inner products up to an error of about 1/√D.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kbrl_async.errors import UserError
from kbrl_async.kernels.syntax import ReferenceFacts
from kbrl_async.kernels.syntax.reading import GROUPS
from kbrl_async.rollouts.retrieval.embedders.base import Passage, Vectors

NAME = "lexical"
DIMENSION = 512
BUCKETS = 1 << 18
"""Terms share these document counts; a corpus of 20,000 references has about as many different terms."""
WEIGHTS = {"operations": 0.6, "grams": 0.3, "nodes": 0.1}
NEAR_COPY = 0.9
MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Spreads the 32 bits of a term (Fibonacci hashing), so that its place does not follow from its bucket."""
IDF_FILE = "idf.npy"


class LexicalEmbedder:
    """`fit`, then `embed`; or `open` of what was saved."""

    name = NAME
    dimension = DIMENSION
    near_copy = NEAR_COPY

    def __init__(self, idf: NDArray[np.float32] | None = None) -> None:
        self._idf = np.ones(BUCKETS, np.float32) if idf is None else idf

    @classmethod
    def open(cls, folder: Path) -> LexicalEmbedder:
        """Raises `UserError` for weights of another version."""
        idf = np.load(folder / IDF_FILE, allow_pickle=False)
        if idf.shape != (BUCKETS,) or idf.dtype != np.float32 or not np.isfinite(idf).all():
            raise UserError(f"{folder / IDF_FILE} holds no term weights of this version", "Build the index again")
        return cls(idf)

    def save(self, folder: Path) -> None:
        np.save(folder / IDF_FILE, self._idf, allow_pickle=False)

    def fit(self, passages: Iterable[Passage]) -> None:
        """Weights by rarity: `1 + log((N + 1) / (df + 1))`."""
        counts, total = np.zeros(BUCKETS, np.int64), 0
        for passage in passages:
            total += 1
            found = np.concatenate([_terms(passage.reading, group) for group in GROUPS])
            counts[np.unique(found % np.uint64(BUCKETS))] += 1
        self._idf = (1.0 + np.log((total + 1) / (counts + 1))).astype(np.float32)

    def embed(self, passages: Sequence[Passage]) -> Vectors:
        rows = [self._vector(passage.reading) for passage in passages]
        return np.stack(rows) if rows else np.zeros((0, DIMENSION), np.float32)

    def _vector(self, reading: ReferenceFacts) -> NDArray[np.float32]:
        total = np.zeros(DIMENSION, np.float64)
        for group in GROUPS:
            terms, counts = np.unique(_terms(reading, group), return_counts=True)
            weights = (1.0 + np.log(counts)) * self._idf[terms % np.uint64(BUCKETS)]
            if norm := float(np.linalg.norm(weights)):
                mixed = terms * MIXER >> np.uint64(40)
                signs = np.where(mixed & np.uint64(1), 1.0, -1.0)
                places = (mixed >> np.uint64(1)) % np.uint64(DIMENSION)
                hashed = np.bincount(places.astype(np.int64), weights * signs / norm, DIMENSION)
                total += np.sqrt(WEIGHTS[group]) * hashed
        length = float(np.linalg.norm(total))
        return (total / length if length else total).astype(np.float32)


def _terms(reading: ReferenceFacts, group: str) -> NDArray[np.uint64]:
    return np.frombuffer(getattr(reading, group), "<u4").astype(np.uint64)
