"""From what was asked for on the command line to a stream of entries.

::

    GPUMODE/KernelBook   rows ─┐
    archive.parquet      rows ─┼─▶ CorpusSource.read() ─▶ Entry | Skip
    runs/default      kernels ─┘
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.rollouts.retrieval.corpora import folders, kernelbook, rows, sakana
from kbrl_async.rollouts.retrieval.entries import Entry, Skip

PEEKED = 50
"""Rows of a file that are looked at to tell whose columns they are."""


class SourceOptions(msgspec.Struct, frozen=True):
    """Which rows are wanted."""

    backends: frozenset[str] = frozenset()
    """Only these; empty: all."""
    sakana_levels: frozenset[int] = frozenset({1, 2, 3})
    include_incorrect: bool = False


class CorpusSource(msgspec.Struct, frozen=True):
    """One source of a build. `fingerprint` changes when its content does."""

    name: str
    corpus: str
    fingerprint: str
    read: Callable[[], Iterator[Entry | Skip]]


ProblemLoader = Callable[[str], Mapping[str, str]]
"""From a `problems` setting to sources by problem id."""

Maker = Callable[[rows.Row], Entry]


def open_source(place: str, options: SourceOptions, problems: ProblemLoader) -> CorpusSource:
    """What `place` names. Raises `UserError` for nothing that we know, `MissingTool` for what needs an extra."""
    path = Path(place)
    if path.is_dir():
        return _filtered(_folder(path, problems), options)
    corpus = _corpus(place)
    read = partial(_entries, place, corpus.maker(options))
    return _filtered(CorpusSource(place, corpus.name, rows.fingerprint(place), read), options)


def _folder(path: Path, problems: ProblemLoader) -> CorpusSource:
    if folders.is_run(path):
        known = problems(folders.run_problems(path))
        read = partial(folders.run_entries, path, known)
        return CorpusSource(str(path), folders.RUN, folders.fingerprint(path), read)
    return CorpusSource(str(path), folders.FOLDER, folders.fingerprint(path), partial(folders.folder_entries, path))


class Corpus(msgspec.Struct, frozen=True):
    """A data set whose rows we understand."""

    name: str
    hub: str
    columns: frozenset[str]
    """By which its files are known."""
    maker: Callable[[SourceOptions], Maker]


def _archive(options: SourceOptions) -> Maker:
    return partial(sakana.entry, levels=options.sakana_levels, include_incorrect=options.include_incorrect)


CORPORA = (
    Corpus(kernelbook.NAME, kernelbook.HUB, kernelbook.COLUMNS, lambda options: kernelbook.entry),
    Corpus(sakana.NAME, sakana.HUB, sakana.COLUMNS, _archive),
)


def known_corpora() -> list[str]:
    """Their names on the hub."""
    return [corpus.hub for corpus in CORPORA]


def _corpus(place: str) -> Corpus:
    if not Path(place).exists() and (known := [corpus for corpus in CORPORA if corpus.hub == place]):
        return known[0]
    # any single row may be broken, so that the columns of the first few together decide
    peeked = itertools.islice(rows.read_rows(place), PEEKED)
    seen = {name for row in peeked if not isinstance(row, Skip) for name in row}
    if found := [corpus for corpus in CORPORA if seen >= corpus.columns]:
        return found[0]
    columns = ". Of ".join(f"{corpus.hub}: {', '.join(sorted(corpus.columns))}" for corpus in CORPORA)
    raise UserError(f"{place} has the columns of no corpus that we know", f"Of {columns}")


def _entries(place: str, maker: Maker) -> Iterator[Entry | Skip]:
    for row in rows.read_rows(place):
        if isinstance(row, Skip):
            yield row
            continue
        try:
            yield maker(row)
        except Skip as skip:
            yield skip


def _filtered(source: CorpusSource, options: SourceOptions) -> CorpusSource:
    if not options.backends:
        return source
    read = source.read

    def chosen() -> Iterator[Entry | Skip]:
        for entry in read():
            wanted = isinstance(entry, Skip) or entry.backend in options.backends
            yield entry if wanted else Skip("another backend")

    return msgspec.structs.replace(source, read=chosen)
