"""What kernels that a bench has judged tell of those that it has not.

::

    archives ─ judged kernels ─┬─ pairs (better, worse) ─▶ ValueModel ─▶ what `kbrl optimize` verifies first
                               └─ right or wrong ─▶ ChanceModel ─▶ what a run's benches take first

It orders and never decides: whatever it says, a kernel counts by its own verdict, and no reward looks at it.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kbrl_async.errors import UserError
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from protocols.records import VERIFIER

SIZE = 1 << 16
MOST_PAIRS = 60
"""Of one problem: those with thousands would be all that is learned."""
LEAST_PAIRS = 20
RATE, RIDGE = 0.3, 1e-3
Features = NDArray[np.int64]
"""Places of one example's features, each once a count."""
_WORD = re.compile(r"[A-Za-z_]\w*|\d+\.?\d*|[^\w\s]")


class JudgedKernel(msgspec.Struct, frozen=True):
    """A kernel and what a bench said of it."""

    module: str
    kernel: str
    worth: tuple[float, ...]
    """Larger is better: right, lower end of the speedup, reward."""
    group_id: str = ""


class ValueModel:
    def __init__(self) -> None:
        self._model = Logistic(SIZE)
        self.pairs = 0

    def fit(self, kernels: Iterable[JudgedKernel]) -> ValueModel:
        """:raises UserError: there are too few pairs to learn from."""
        examples = [(self._of(a), self._of(b), 1.0) for a, b in pairs_of(kernels)]
        self.pairs = len(examples)
        if self.pairs < LEAST_PAIRS:
            cause = f"a value model needs {LEAST_PAIRS} pairs of better and worse kernels, and there are {self.pairs}"
            raise UserError(cause, "Give runs with more answers, and with their records (archive.keep=all)")
        self._model.fit(examples)
        return self

    def value(self, module: str, kernel: str) -> float:
        """Comparable between kernels for the same module."""
        return self._model.score(features(module, kernel))

    def _of(self, judged: JudgedKernel) -> Features:
        return features(judged.module, judged.kernel)


class ChanceModel:
    """The chance that a kernel is right, which kernels of several modules can be compared by."""

    def __init__(self) -> None:
        self._model = Logistic(SIZE + 1)
        self.kernels = 0

    def fit(self, kernels: Iterable[JudgedKernel]) -> ChanceModel:
        """:raises UserError: there are too few right or too few wrong kernels to learn from."""
        judged = list({(one.module, one.kernel): one for one in kernels}.values())
        right = sum(one.worth[0] > 0 for one in judged)
        if min(right, len(judged) - right) < LEAST_PAIRS:
            cause = f"chances can't be learned from {right} right and {len(judged) - right} wrong kernels"
            raise UserError(cause, f"Name runs with {LEAST_PAIRS} of each, and with their records (archive.keep=all)")
        self.kernels = len(judged)
        nothing = np.empty(0, np.int64)
        self._model.fit([(self._of(one.module, one.kernel), nothing, one.worth[0]) for one in judged])
        return self

    def chance(self, module: str, kernel: str) -> float:
        """From 0 to 1."""
        return float(1 / (1 + np.exp(-np.clip(self._model.score(self._of(module, kernel)), -30, 30))))

    def _of(self, module: str, kernel: str) -> Features:
        return np.append(features(module, kernel), SIZE)


class Logistic:
    """Logistic regression on sparse counts: p = sigmoid(sum of weights); AdaGrad over a fixed order, with a ridge."""

    def __init__(self, size: int) -> None:
        self._weights = np.zeros(size)
        self._squares = np.full(size, 1e-6)

    def score(self, features: Features) -> float:
        return float(self._weights[features].sum())

    def fit(self, examples: Sequence[tuple[Features, Features, float]], passes: int = 5) -> None:
        """Each example is features that speak for it, features that speak against, and its share of successes."""
        order = np.random.default_rng(0)
        for _ in range(passes):
            for place in order.permutation(len(examples)):
                self._step(*examples[place])

    def _step(self, plus: Features, minus: Features, share: float) -> None:
        score = np.clip(self.score(plus) - self.score(minus), -30, 30)
        wrong = 1.0 / (1.0 + np.exp(-score)) - share
        for features, sign in ((plus, 1.0), (minus, -1.0)):
            places, counts = np.unique(features, return_counts=True)
            gradient = sign * wrong * counts + RIDGE * self._weights[places]
            self._squares[places] += gradient**2
            self._weights[places] -= RATE * gradient / np.sqrt(self._squares[places])


def features(module: str, kernel: str) -> Features:
    """Pairs of neighbouring words of the kernel, alone and with each operation of the module, hashed."""
    words = _WORD.findall(kernel)
    pairs = {f"{a} {b}" for a, b in itertools.pairwise(words)}
    chain = _chain(module)
    texts = [*pairs, *(f"{operation}|{pair}" for operation in chain for pair in pairs)]
    return np.array([zlib.crc32(text.encode()) % SIZE for text in texts], np.int64)


def _chain(module: str) -> frozenset[str]:
    try:
        return frozenset(operations(Scope(module)))
    except (SyntaxError, ValueError):
        return frozenset()


def pairs_of(kernels: Iterable[JudgedKernel]) -> list[tuple[JudgedKernel, JudgedKernel]]:
    """(better, worse) of one problem each, at most so many a problem; equal ones are no pair."""
    by_module: Mapping[str, list[JudgedKernel]] = defaultdict(list)
    for one in {(k.module, k.kernel): k for k in kernels}.values():
        by_module[one.module].append(one)
    found: list[tuple[JudgedKernel, JudgedKernel]] = []
    for module, mine in sorted(by_module.items()):
        every = [(a, b) for a, b in itertools.permutations(mine, 2) if a.worth > b.worth]
        found += random.Random(len(module)).sample(every, min(MOST_PAIRS, len(every)))
    return found


def chances_of(runs: Sequence[str]) -> ChanceModel | None:
    """What these runs teach; None of no run.

    :raises UserError: a folder is no run, or too little is in them.
    """
    return ChanceModel().fit(judged_in([Path(run).expanduser() for run in runs])) if runs else None


def judged_in(runs: Sequence[Path]) -> list[JudgedKernel]:
    """Kernels of runs' training that compiled, in the order of their answers.

    :raises UserError: a folder is no run.
    """
    found = []
    for run in runs:
        if not (run / FILE).is_file():
            raise UserError(f"{run} has no archive to learn from", "Give a run folder; see 'kbrl runs'")
        with ArchiveReader(run / FILE) as archive:
            for row in archive.rows(purpose="train"):
                if not row.compiled or row.role == VERIFIER or row.reward is None:
                    continue
                if (record := archive.record(row.task_id)) is not None:
                    worth = (float(row.correct), row.lo or 0.0, row.reward)
                    found.append(JudgedKernel(record.request.problem.source, record.source, worth, row.group_id))
    return found
