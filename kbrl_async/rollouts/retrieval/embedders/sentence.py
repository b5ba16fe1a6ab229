"""Embedders of sentence-transformers: any name or folder that it can load, such as `BAAI/bge-code-v1`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kbrl_async.errors import MissingTool, UserError
from kbrl_async.rollouts.retrieval.embedders.base import Passage, Vectors

NEAR_COPY = 0.97
"""Dense models put all code close together; this is above what different modules reach with them."""
BATCH = 16


class SentenceEmbedder:
    """Loads the model when it is made."""

    near_copy = NEAR_COPY

    def __init__(self, name: str) -> None:
        self.name = name
        self._model = _load(name)
        self.dimension = int(self._model.get_sentence_embedding_dimension())

    def fit(self, passages: Iterable[Passage]) -> None:
        """Nothing: the model knows its language already."""

    def save(self, folder: Path) -> None:
        """Nothing: the manifest names the model."""

    def embed(self, passages: Sequence[Passage]) -> Vectors:
        texts = [passage.source for passage in passages]
        found = self._model.encode(
            texts, batch_size=BATCH, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return np.asarray(found, np.float32).reshape(len(texts), self.dimension)


def _load(name: str) -> Any:
    try:
        library = importlib.import_module("sentence_transformers")
    except ImportError as error:
        cause = f"the embedder {name} needs the package sentence-transformers, which is not installed"
        cure = "Install it with: pip install 'kbrl-async[retrieval]', or take --model lexical"
        raise MissingTool(cause, cure) from error
    try:
        return library.SentenceTransformer(name)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the embedder {name} can't be loaded: {first}", "Check its name, or take --model lexical"
        ) from error
