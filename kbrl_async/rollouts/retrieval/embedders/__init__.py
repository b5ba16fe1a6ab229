"""Embedders: from a reference to a unit vector.

`lexical` needs no download. A user's own is a class with `Embedder`'s methods, found by `package.module:object` or an
entry point; every other name is one that sentence-transformers can load.
"""

from __future__ import annotations

from pathlib import Path

from kbrl_async.doors import Door
from kbrl_async.rollouts.retrieval.embedders.base import Embedder, Passage, Vectors
from kbrl_async.rollouts.retrieval.embedders.sentence import SentenceEmbedder

EMBEDDERS = Door("embedders", {"lexical": f"{__name__}.lexical:LexicalEmbedder"})
"""Classes: `cls()` makes a new one, `cls.open(folder)` one of what `save` wrote."""
DENSE = ("BAAI/bge-code-v1", "nomic-ai/nomic-embed-code")
"""Models of sentence-transformers that the docs recommend; the first is the default where there is a GPU."""

__all__ = ["DENSE", "EMBEDDERS", "Embedder", "Passage", "Vectors", "is_known", "make_embedder", "open_embedder"]


def is_known(name: str) -> bool:
    """Whether an index may name it on its own: ours, an installed package's, or a model that the docs recommend.

    Any other name has code imported, or a model's folder opened, that whoever wrote the index has chosen.
    """
    return name in EMBEDDERS.names() or name in DENSE


def make_embedder(name: str) -> Embedder:
    """A new one, to build an index with.

    :raises UserError: it can't be loaded.
    """
    embedder: Embedder = EMBEDDERS.load(name)() if EMBEDDERS.knows(name) else SentenceEmbedder(name)
    return embedder


def open_embedder(name: str, folder: Path) -> Embedder:
    """The one that an index in `folder` was built with.

    :raises UserError: it can't be loaded.
    """
    embedder: Embedder = EMBEDDERS.load(name).open(folder) if EMBEDDERS.knows(name) else SentenceEmbedder(name)
    return embedder
