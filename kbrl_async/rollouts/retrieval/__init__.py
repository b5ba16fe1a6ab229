"""Retrieval: worked examples for a prompt, and the rules that keep a problem's own solution out of it.

Owns corpora, embedders, the index on disk, the live index, leak rules and ranking. Never runs code, never makes a
prompt.
Front door: `Retriever`. An index is made by `kbrl_async.lab.indexing`.
"""

from kbrl_async.rollouts.retrieval.corpora import CorpusSource, open_source
from kbrl_async.rollouts.retrieval.corpora.registry import SourceOptions
from kbrl_async.rollouts.retrieval.entries import Entry
from kbrl_async.rollouts.retrieval.live import NO_ADDITIONS, LiveEntries, LiveIndex
from kbrl_async.rollouts.retrieval.retriever import Hit, Query, Retrieved, Retriever
from kbrl_async.rollouts.retrieval.store import Manifest

__all__ = [
    "NO_ADDITIONS",
    "CorpusSource",
    "Entry",
    "Hit",
    "LiveEntries",
    "LiveIndex",
    "Manifest",
    "Query",
    "Retrieved",
    "Retriever",
    "SourceOptions",
    "open_source",
]
