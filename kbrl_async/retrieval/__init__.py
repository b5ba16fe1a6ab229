"""Retrieval: worked examples for a prompt, and the rules that keep a problem's own solution out of it.

Owns corpora, embedders, the index on disk, the live index, leak rules and ranking. Never runs code, never makes a
prompt.
Front doors: `build_index` to make an index, `Retriever` to ask one.
"""

from kbrl_async.retrieval.building import BuildOptions, build_index
from kbrl_async.retrieval.corpora import Source, open_source
from kbrl_async.retrieval.corpora.registry import SourceOptions
from kbrl_async.retrieval.entries import Entry
from kbrl_async.retrieval.live import NO_ADDITIONS, LiveIndex, Snapshot
from kbrl_async.retrieval.retriever import Hit, Query, Retrieved, Retriever
from kbrl_async.retrieval.store import Manifest

__all__ = [
    "NO_ADDITIONS",
    "BuildOptions",
    "Entry",
    "Hit",
    "LiveIndex",
    "Manifest",
    "Query",
    "Retrieved",
    "Retriever",
    "Snapshot",
    "Source",
    "SourceOptions",
    "build_index",
    "open_source",
]
