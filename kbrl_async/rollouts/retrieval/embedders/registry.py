"""The embedders by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kbrl_async.rollouts.retrieval.embedders import lexical, sentence
from kbrl_async.rollouts.retrieval.embedders.base import Embedder

EMBEDDERS: dict[str, tuple[Callable[[], Embedder], Callable[[Path], Embedder]]] = {
    lexical.NAME: (lexical.LexicalEmbedder, lexical.LexicalEmbedder.open),
}
"""Name → (make a new one, open what it saved). Names that are not here are models of sentence-transformers."""


def make_embedder(name: str) -> Embedder:
    """A new one, to build an index with."""
    return EMBEDDERS[name][0]() if name in EMBEDDERS else sentence.SentenceEmbedder(name)


def open_embedder(name: str, folder: Path) -> Embedder:
    """The one that an index in `folder` was built with."""
    return EMBEDDERS[name][1](folder) if name in EMBEDDERS else sentence.SentenceEmbedder(name)
