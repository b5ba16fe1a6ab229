"""Embedders: from a reference to a unit vector.

To add one: a class with `Embedder`'s methods and one line in `EMBEDDERS`.

`lexical` needs no download; every other name is one that sentence-transformers can load.
"""

from kbrl_async.rollouts.retrieval.embedders.base import Embedder, Passage, Vectors
from kbrl_async.rollouts.retrieval.embedders.registry import EMBEDDERS, make_embedder, open_embedder

__all__ = ["EMBEDDERS", "Embedder", "Passage", "Vectors", "make_embedder", "open_embedder"]
