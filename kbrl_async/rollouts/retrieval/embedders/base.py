"""What every embedder does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kbrl_async.kernels.syntax import ReferenceFacts

Vectors = NDArray[np.float32]
"""One unit vector a row, so that an inner product is a cosine."""


class Passage(msgspec.Struct, frozen=True):
    """A reference and what was read from it."""

    source: str
    reading: ReferenceFacts


class Embedder(Protocol):
    """Deterministic. A row that holds nothing to embed is a zero vector, which resembles nothing."""

    @property
    def name(self) -> str:
        """What opens it again: `lexical`, or a model's name."""

    @property
    def dimension(self) -> int: ...

    @property
    def near_copy(self) -> float:
        """Similarity from which two references count as copies of each other."""

    def fit(self, passages: Iterable[Passage]) -> None:
        """Learns what it needs of the corpus, once, before the first `embed`."""

    def embed(self, passages: Sequence[Passage]) -> Vectors: ...

    def save(self, folder: Path) -> None:
        """Writes what `fit` learned."""
