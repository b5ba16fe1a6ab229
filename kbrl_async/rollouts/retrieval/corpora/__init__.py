"""Corpora: where examples come from. To add one: a module that makes an `Entry` of a row, and one line in `CORPORA`.

Owns reading rows that strangers wrote (`rows`) and turning each into an `Entry` or a counted reason to leave it out.
Invariant: no row, however broken, stops a build.
"""

from kbrl_async.rollouts.retrieval.corpora.registry import CorpusSource, known_corpora, open_source

__all__ = ["CorpusSource", "known_corpora", "open_source"]
