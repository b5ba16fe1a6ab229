"""Asks an index: which examples may this problem see, and which of them help most?

::

    problem ─▶ embed ─▶ search ─▶ leak rules ─▶ fit the prompt? ─▶ rank ─▶ hits, with the reasons for all the others
                          ▲                                          │
                          └──────── wider, while too few are left ───┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kbrl_async.errors import UserError
from kbrl_async.kernels.syntax import ReferenceFacts, Unreadable, read
from kbrl_async.rollouts.retrieval.embedders import Embedder, Passage, Vectors
from kbrl_async.rollouts.retrieval.entries import BACKENDS, Entry
from kbrl_async.rollouts.retrieval.leakage import Protected, refused
from kbrl_async.rollouts.retrieval.live import NO_ADDITIONS, LiveEntries
from kbrl_async.rollouts.retrieval.ranking import DEFAULT, Rankable, Ranked, RankOptions, rank
from kbrl_async.rollouts.retrieval.store import Facts, IndexReader, id_hash

MAX_SHOWN = 10_000
"""Characters of reference and kernel together that fit a prompt as one example."""
WINDOW = 64
PER_HIT = 8
"""Candidates that ranking shall choose each hit from."""
OTHER_BACKEND, TOO_LONG = "another backend", "too long for a prompt"
HELD_OUT = "of a held-out problem: "


class Query(msgspec.Struct, frozen=True):
    """A problem that examples are wanted for."""

    source: str
    problem_id: str = ""
    backend: str = ""
    """Preferred, or with `only_backend` the only one."""
    only_backend: bool = False
    k: int = 3


class Hit(msgspec.Struct, frozen=True):
    """An example, its score and the parts of it."""

    entry: Entry
    score: float
    parts: dict[str, float]

    @property
    def reference(self) -> str:
        return self.entry.reference

    @property
    def kernel(self) -> str:
        return self.entry.kernel

    @property
    def speedup(self) -> float | None:
        return self.entry.speedup if self.entry.verified else None


class NotTaken(msgspec.Struct, frozen=True):
    """An example that was found and not taken."""

    uid: str
    rule: str
    similarity: float


class Retrieved(msgspec.Struct, frozen=True):
    """The answer to a query. `version` names the index's content, the live part included."""

    hits: list[Hit]
    refused: Counter[str]
    version: str
    nearest_refused: list[NotTaken]
    """The most similar ones that a rule kept out, to show."""


class Retriever:
    """An opened index and the held-out problems that no prompt may ever hold a solution of."""

    def __init__(
        self,
        store: IndexReader,
        guarded: Iterable[tuple[str, str]] = (),
        options: RankOptions = DEFAULT,
        embedder: str = "",
    ) -> None:
        self._store = store
        self._embedder: Embedder = store.embedder(embedder)
        self._options = options
        self._guarded = self._protect(list(guarded))

    @classmethod
    def open(cls, path: Path, guarded: Iterable[tuple[str, str]] = (), embedder: str = "") -> Retriever:
        """`guarded`: (identifier, source) of the problems that are held out."""
        return cls(IndexReader(path), guarded, embedder=embedder)

    @property
    def build(self) -> str:
        return self._store.manifest.build

    def read(self, source: str) -> tuple[ReferenceFacts, NDArray[np.float32]]:
        """What is known of a reference. Raises `UserError` for one that can't be read."""
        try:
            reading = read(source)
        except Unreadable as unreadable:
            raise UserError(f"the problem {unreadable.reason}", "Give a file that defines `class Model`") from None
        return reading, self._embedder.embed([Passage(source, reading)])[0]

    def retrieve(self, query: Query, live: LiveEntries = NO_ADDITIONS) -> Retrieved:
        """The best examples for a problem; fewer than `k` where the rules leave fewer."""
        reading, vector = self.read(query.source)
        own = _one(query.problem_id, reading, vector)
        gathered = _Gathered(query, own, self._guarded, self._store.manifest.near_copy)
        gathered.add_live(live, vector)
        seen, window = 0, max(WINDOW, PER_HIT * query.k)
        while seen < self._store.count and (not seen or len(gathered.candidates) < PER_HIT * query.k):
            rows, scores = self._store.vectors.search(vector, window)
            new = slice(seen, None)
            gathered.add(self._store.facts[rows[new]], self._store.vectors.vectors(rows[new]), scores[new], rows[new])
            if len(rows) < window:
                break
            seen, window = len(rows), 8 * window
        return self._answer(query, gathered, live)

    def _answer(self, query: Query, gathered: _Gathered, live: LiveEntries) -> Retrieved:
        def entry(row: int) -> Entry:
            return self._store.entry(row) if row >= 0 else live.entries[-1 - row]

        vectors = np.stack(gathered.vectors) if gathered.vectors else np.zeros((0, 1), np.float32)
        ranked: list[Ranked] = rank(gathered.candidates, vectors, query.k, query.backend, self._options)
        hits = [Hit(entry(gathered.rows[r.position]), r.score, r.parts) for r in ranked]
        nearest = [NotTaken(entry(row).uid, rule, score) for row, rule, score in gathered.nearest]
        version = f"{self.build}+{live.version}" if live.version else self.build
        return Retrieved(hits, gathered.refused, version, nearest)

    def _protect(self, problems: Sequence[tuple[str, str]]) -> Protected:
        total = _NOBODY
        for problem_id, source in problems:
            total = _joined(total, _one(problem_id, *self.read(source)))
        return total


class _Gathered:
    """What a search has brought so far: candidates for ranking, and the refused."""

    def __init__(self, query: Query, own: Protected, guarded: Protected, near_copy: float) -> None:
        self._query, self._own, self._guarded, self._near_copy = query, own, guarded, near_copy
        self.candidates: list[Rankable] = []
        self.vectors: list[NDArray[np.float32]] = []
        self.rows: list[int] = []
        self.refused: Counter[str] = Counter()
        self.nearest: list[tuple[int, str, float]] = []

    def add(self, facts: Facts, vectors: Vectors, scores: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
        own = refused(facts, vectors, self._own, self._near_copy)
        guarded = refused(facts, vectors, self._guarded, self._near_copy)
        for place in range(len(rows)):
            leak = own[place] or (guarded[place] and HELD_OUT + guarded[place])
            rule = leak or self._unfit(facts[place])
            if rule:
                self.refused[rule] += 1
            if leak and len(self.nearest) < 5:
                self.nearest.append((int(rows[place]), rule, float(scores[place])))
            if not rule:
                self.candidates.append(_candidate(facts[place], float(scores[place])))
                self.vectors.append(vectors[place])
                self.rows.append(int(rows[place]))

    def add_live(self, live: LiveEntries, vector: NDArray[np.float32]) -> None:
        if live.entries:
            rows = -1 - np.arange(len(live.entries))
            self.add(live.facts, live.vectors, live.vectors @ vector, rows)

    def _unfit(self, fact: Facts) -> str:
        if self._query.only_backend and BACKENDS[int(fact["backend"])] != self._query.backend:
            return OTHER_BACKEND
        return TOO_LONG if int(fact["characters"]) > MAX_SHOWN else ""


def _candidate(fact: Facts, similarity: float) -> Rankable:
    speedup = float(fact["speedup"])
    return Rankable(
        similarity,
        BACKENDS[int(fact["backend"])],
        bool(fact["verified"]),
        None if math.isnan(speedup) else speedup,
        int(fact["code"]),
    )


def _one(problem_id: str, reading: ReferenceFacts, vector: NDArray[np.float32]) -> Protected:
    problem = id_hash(problem_id)
    return Protected(
        np.array([problem] if problem else [], np.uint64),
        np.array([reading.code_hash], np.uint64),
        np.array([reading.chain_hash] if reading.chain_hash else [], np.uint64),
        vector.reshape(1, -1),
    )


_NOTHING = np.zeros(0, np.uint64)
_NOBODY = Protected(_NOTHING, _NOTHING, _NOTHING, np.zeros((0, 0), np.float32))


def _joined(one: Protected, other: Protected) -> Protected:
    if not len(one.codes):
        return other
    return Protected(
        np.concatenate([one.problems, other.problems]),
        np.concatenate([one.codes, other.codes]),
        np.concatenate([one.chains, other.chains]),
        np.concatenate([one.vectors, other.vectors]),
    )
