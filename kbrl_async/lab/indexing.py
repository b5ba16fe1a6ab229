"""Builds an index: harvest, choose, fit, embed, write. What was done survives a kill.

::

    sources ─▶ harvest-000000.msgpack … ─▶ choose ─▶ fit ─▶ vectors-000000.npy … ─▶ <folder>/ ─▶ manifest
               └───── OUTPUT/.building, continued by the next call with the same plan ────┘

Invariants
* Every row ends as kept or as one counted reason.
* The same plan gives the same build, however often it was interrupted.
* The index that was there stays whole and readable until the new manifest replaces its own in one step.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kbrl_async.errors import AddressTaken, UserError
from kbrl_async.kernels.syntax import ReferenceFacts, Unreadable, read
from kbrl_async.rollouts.retrieval import vectors
from kbrl_async.rollouts.retrieval.choosing import Choice, choose
from kbrl_async.rollouts.retrieval.corpora import CorpusSource
from kbrl_async.rollouts.retrieval.embedders import Embedder, Passage, Vectors, make_embedder
from kbrl_async.rollouts.retrieval.entries import Entry, Skip, checked
from kbrl_async.rollouts.retrieval.store import (
    ENTRIES,
    FACT,
    FACTS,
    FORMAT,
    MANIFEST,
    OFFSETS,
    VECTORS,
    Manifest,
    SourceReport,
    fact_of,
)

Progress = Callable[[str, int, int | None], None]
"""Called with the phase, rows done, and rows in all where that is known."""


class IndexOptions(msgspec.Struct, frozen=True):
    """What shapes a build, besides its sources."""

    embedder: str = "lexical"
    per_reference: int = 4
    """Kernels kept of one reference and backend: the verified and fastest ones."""
    exact_below: int = vectors.EXACT_BELOW
    chunk: int = 1000
    """Rows that are harvested, and embedded, between two savings."""


class Harvested(msgspec.Struct, frozen=True):
    """A usable row."""

    entry: Entry
    reading: ReferenceFacts


class Harvest(msgspec.Struct, frozen=True):
    """One chunk of a source's rows."""

    source: int
    rows: int
    items: list[Harvested]
    skipped: dict[str, int]


def build_index(
    sources: Sequence[CorpusSource],
    output: Path,
    options: IndexOptions | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> Manifest:
    """Builds, or finishes building, the index in `output`. Raises `UserError` where nothing usable was found."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AddressTaken(f"another build is writing {output}", "Wait for it, or take another --output") from None
        return _Build(sources, output, options or IndexOptions(), progress).run()


class _Build:
    def __init__(
        self, sources: Sequence[CorpusSource], output: Path, options: IndexOptions, progress: Progress
    ) -> None:
        self._sources, self._output, self._options, self._progress = sources, output, options, progress
        self._work = output / ".building"
        self._plan = msgspec.json.encode(
            {
                "format": FORMAT,
                "options": msgspec.to_builtins(options),
                "sources": [[source.name, source.corpus, source.fingerprint] for source in sources],
            },
            order="deterministic",
        )
        self._decoder = msgspec.msgpack.Decoder(Harvest)

    def run(self) -> Manifest:
        self._take_up()
        files = self._harvest()
        choice = choose(
            ((harvest.source, [item.entry for item in harvest.items]) for harvest in self._read(files)),
            self._options.per_reference,
        )
        if not choice.kept:
            raise UserError("no row could be used: " + self._reasons(files, choice), "Give other sources or options")
        embedder = make_embedder(self._options.embedder)
        self._progress("fit", 0, None)
        embedder.fit(Passage(item.entry.reference, item.reading) for item in self._kept(files, choice))
        parts = self._embed(files, choice, embedder)
        manifest = self._write(files, choice, embedder, parts)
        self._publish(manifest)
        return manifest

    def _take_up(self) -> None:
        """Goes on with unfinished work of the same plan; clears away any other."""
        plan = self._work / "plan.json"
        if not (plan.is_file() and plan.read_bytes() == self._plan):
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir()
            _replace(plan, self._plan)

    # ── harvest ───────────────────────────────────────────────────────────────────────────────────────────────

    def _harvest(self) -> list[Path]:
        files = sorted(self._work.glob("harvest-*.msgpack"))
        done: Counter[int] = Counter()
        for harvest in self._read(files):
            done[harvest.source] += harvest.rows
        for number, source in enumerate(self._sources):
            rows = itertools.islice(source.read(), done[number], None)
            while chunk := list(itertools.islice(rows, self._options.chunk)):
                path = self._work / f"harvest-{len(files):06d}.msgpack"
                _replace(path, msgspec.msgpack.encode(_harvested(number, chunk)))
                files.append(path)
                done[number] += len(chunk)
                self._progress(f"read {source.name}", done[number], None)
        return files

    def _read(self, files: Sequence[Path]) -> Iterator[Harvest]:
        return (self._decoder.decode(path.read_bytes()) for path in files)

    def _kept(self, files: Sequence[Path], choice: Choice) -> Iterator[Harvested]:
        return itertools.chain.from_iterable(self._kept_by_file(files, choice))

    def _kept_by_file(self, files: Sequence[Path], choice: Choice) -> Iterator[list[Harvested]]:
        position = 0
        for harvest in self._read(files):
            yield [item for place, item in enumerate(harvest.items, position) if place in choice.kept]
            position += len(harvest.items)

    def _reasons(self, files: Sequence[Path], choice: Choice) -> str:
        found: Counter[str] = Counter()
        for report in self._reports(files, choice):
            found.update(report.skipped)
        return ", ".join(f"{count} × {reason}" for reason, count in found.most_common(5)) or "the sources are empty"

    def _reports(self, files: Sequence[Path], choice: Choice) -> list[SourceReport]:
        rows: Counter[int] = Counter()
        skipped: list[Counter[str]] = [Counter(choice.dropped.get(n, {})) for n in range(len(self._sources))]
        for harvest in self._read(files):
            rows[harvest.source] += harvest.rows
            skipped[harvest.source].update(harvest.skipped)
        return [
            SourceReport(
                source.name, source.corpus, source.fingerprint, rows[n], rows[n] - skipped[n].total(),
                dict(sorted(skipped[n].items())),
            )
            for n, source in enumerate(self._sources)
        ]  # fmt: skip

    # ── embed and write ───────────────────────────────────────────────────────────────────────────────────────

    def _embed(self, files: Sequence[Path], choice: Choice, embedder: Embedder) -> list[Path]:
        parts: list[Path] = []
        done = 0
        for number, items in enumerate(self._kept_by_file(files, choice)):
            path = self._work / f"vectors-{number:06d}.npy"
            if not path.is_file():
                found = embedder.embed([Passage(item.entry.reference, item.reading) for item in items])
                unfinished = path.with_suffix(".unfinished")
                with unfinished.open("wb") as file:
                    np.save(file, found.reshape(len(items), embedder.dimension), allow_pickle=False)
                os.replace(unfinished, path)
            parts.append(path)
            done += len(items)
            self._progress("embed", done, len(choice.kept))
        return parts

    def _write(self, files: Sequence[Path], choice: Choice, embedder: Embedder, parts: Sequence[Path]) -> Manifest:
        count = len(choice.kept)
        self._progress("write", 0, count)
        build, folder = hashlib.sha256(self._plan).hexdigest()[:16], self._work / "index"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        kind = vectors.kind_for(count, self._options.exact_below)

        def read_parts() -> Iterator[Vectors]:
            return (np.load(path, allow_pickle=False) for path in parts)

        vectors.write(folder / VECTORS, kind, embedder.dimension, count, read_parts)
        _write_entries(folder, count, self._kept(files, choice))
        embedder.save(folder)
        return Manifest(
            FORMAT,
            build,
            f"{build}{secrets.token_hex(4)}",
            count,
            kind,
            self._options.embedder,
            embedder.dimension,
            embedder.near_copy,
            self._reports(files, choice),
            {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
            msgspec.to_builtins(self._options),
        )

    def _publish(self, manifest: Manifest) -> None:
        """The new build becomes the one that counts; the old ones go. Readers keep what they have open."""
        folder = self._output / manifest.folder
        os.replace(self._work / "index", folder)
        encoded: bytes = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        _replace(self._output / MANIFEST, encoded)
        shutil.rmtree(self._work)
        for old in self._output.iterdir():
            if old.is_dir() and old != folder and (old / FACTS).is_file():
                shutil.rmtree(old)


def _harvested(source: int, rows: Sequence[Entry | Skip]) -> Harvest:
    items: list[Harvested] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            if isinstance(row, Skip):
                raise row
            entry = checked(row)
            items.append(Harvested(entry, read(entry.reference)))
        except Skip as skip:
            skipped[skip.reason] += 1
        except Unreadable as unreadable:
            skipped["reference " + unreadable.reason] += 1
    return Harvest(source, len(rows), items, dict(skipped))


def _write_entries(folder: Path, count: int, items: Iterator[Harvested]) -> None:
    facts, offsets = np.zeros(count, FACT), np.zeros(count + 1, np.uint64)
    encoder, place = msgspec.json.Encoder(), 0
    with (folder / ENTRIES).open("wb") as file:
        for row, item in enumerate(items):
            line = encoder.encode(item.entry) + b"\n"
            file.write(line)
            place += len(line)
            offsets[row + 1] = place
            facts[row] = fact_of(item.entry, item.reading)
    np.save(folder / FACTS, facts, allow_pickle=False)
    np.save(folder / OFFSETS, offsets, allow_pickle=False)


def _replace(path: Path, content: bytes) -> None:
    unfinished: Any = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
