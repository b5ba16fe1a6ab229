"""An index on disk: what its files are, and opening them.

::

    OUTPUT/manifest.json        names the folder that counts; replaced in one step, written last
    OUTPUT/<folder>/vectors.faiss  facts.npy  entries.jsonl  offsets.npy  [what the embedder learned]

Invariants
* Row i of every file is the same example. Vectors and facts are memory-mapped, an entry is read when it is shown.
* A build is never changed: a new one gets a new folder, and a reader keeps the one that it has opened.
* No pickle in any file.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kbrl_async.errors import UserError
from kbrl_async.kernels.syntax import ReferenceFacts
from kbrl_async.rollouts.retrieval.embedders import Embedder, is_known, open_embedder
from kbrl_async.rollouts.retrieval.entries import BACKENDS, Entry
from kbrl_async.rollouts.retrieval.vectors import VectorIndex

FORMAT = 1
"""Raised with every change that old indexes can't be read with."""
MANIFEST = "manifest.json"
VECTORS, FACTS, ENTRIES, OFFSETS = "vectors.faiss", "facts.npy", "entries.jsonl", "offsets.npy"
REBUILD = "Build the index again with: kbrl index build"

FACT = np.dtype(
    [
        ("code", "<u8"), ("chain", "<u8"), ("problem", "<u8"), ("backend", "u1"), ("verified", "?"),
        ("speedup", "<f4"), ("characters", "<u4"),
    ]
)  # fmt: skip
"""What rules and ranking need of every row; `speedup` is NaN where none is known."""
Facts = NDArray[Any]


class SourceReport(msgspec.Struct, frozen=True):
    """What became of a source's rows: `rows == kept + Σ skipped`."""

    name: str
    corpus: str
    fingerprint: str
    rows: int
    kept: int
    skipped: dict[str, int]


class Manifest(msgspec.Struct, frozen=True):
    """What an index is."""

    format: int
    build: str
    """Names the content: the same sources and options give the same build."""
    folder: str
    count: int
    kind: str
    """`exact` or `ivf`."""
    embedder: str
    dimension: int
    near_copy: float
    sources: list[SourceReport]
    files: dict[str, int]
    """Bytes by name."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)


def id_hash(problem_id: str) -> int:
    """0 for none, so that unknown problems never count as the same."""
    if not problem_id:
        return 0
    return int.from_bytes(hashlib.blake2b(problem_id.encode("utf-8", "replace"), digest_size=8).digest(), "little") | 1


def fact_of(entry: Entry, reading: ReferenceFacts) -> tuple[int, int, int, int, bool, float, int]:
    """One row of `FACT`."""
    backend = BACKENDS.index(entry.backend) if entry.backend in BACKENDS else 0
    speedup = float("nan") if entry.speedup is None else entry.speedup
    shown = len(entry.reference) + len(entry.kernel)
    return reading.code_hash, reading.chain_hash, id_hash(entry.problem_id), backend, entry.verified, speedup, shown


class IndexReader:
    """An opened index. Safe for any number of readers."""

    def __init__(self, path: Path) -> None:
        self.manifest = read_manifest(path)
        self._folder = path / self.manifest.folder
        self._check_files()
        self.vectors = VectorIndex(self._folder / VECTORS, self.manifest.kind)
        self.facts: Facts = np.load(self._folder / FACTS, mmap_mode="r", allow_pickle=False)
        self._offsets = np.load(self._folder / OFFSETS, mmap_mode="r", allow_pickle=False)
        with (self._folder / ENTRIES).open("rb") as file:
            self._entries = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._check_counts()
        self._decoder = msgspec.json.Decoder(Entry)

    @property
    def count(self) -> int:
        return self.manifest.count

    def embedder(self, name: str = "") -> Embedder:
        """The embedder that the index was built with; another one's vectors would mean nothing here.

        :raises UserError: it is none of ours and `name` does not name it: a manifest alone must not choose an import.
        """
        built = self.manifest.embedder
        if not name and not is_known(built):
            cause = f"the index in {self._folder.parent} would load the embedder {built}, which nobody here has named"
            raise UserError(cause, f"If you trust it: prompt.embedder={built} (kbrl index query: --model {built})")
        if name and name != built:
            cause = f"the index was built with the embedder {built}, not {name}"
            raise UserError(cause, f"Leave the name out, or build an index with --model {name}")
        embedder = open_embedder(built, self._folder)
        if embedder.dimension != self.manifest.dimension:
            have = self.manifest.dimension
            cause = f"the embedder {built} now makes {embedder.dimension} dimensions, the index has {have}"
            raise UserError(cause, REBUILD)
        return embedder

    def entry(self, row: int) -> Entry:
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        line = self._entries[start:end]
        try:
            return self._decoder.decode(line)
        except msgspec.DecodeError as error:
            raise UserError(f"row {row} of {self._folder / ENTRIES} is damaged", REBUILD) from error

    def _check_files(self) -> None:
        for name, size in self.manifest.files.items():
            path = self._folder / name
            found = path.stat().st_size if path.is_file() else -1
            if found != size:
                state = "is missing" if found < 0 else f"has {found} bytes instead of {size}"
                raise UserError(f"{path} {state}", REBUILD)

    def _check_counts(self) -> None:
        counts = {"vectors": self.vectors.count, "facts": len(self.facts), "offsets": len(self._offsets) - 1}
        wrong = [f"{name} {count}" for name, count in counts.items() if count != self.manifest.count]
        if wrong or self.vectors.dimension != self.manifest.dimension or self.facts.dtype != FACT:
            raise UserError(f"the files of {self._folder} do not belong together ({', '.join(wrong)})", REBUILD)


def read_manifest(path: Path) -> Manifest:
    """Raises `UserError` where there is no index, or one of another version."""
    file = path / MANIFEST
    if not file.is_file():
        raise UserError(f"{path} holds no index", "Make one with: kbrl index build SOURCE --output " + str(path))
    try:
        raw = msgspec.json.decode(file.read_bytes())
        if isinstance(raw, dict) and raw.get("format") != FORMAT:
            raise UserError(f"{path} is an index of format {raw.get('format')}, we read {FORMAT}", REBUILD)
        manifest = msgspec.convert(raw, Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{file} can't be read: {error}", REBUILD) from error
    if not manifest.folder.isalnum():
        raise UserError(f"{file} names the folder {manifest.folder!r}", REBUILD)
    return manifest
