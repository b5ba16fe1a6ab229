"""A value model: which of two kernels for one module is the better one, learned from pairs that a bench has judged.

::

    archives ─ judged kernels by problem ─ pairs (better, worse) ─▶ ValueModel ─▶ what is verified, or refined, first

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

from kbrl_async.errors import UserError
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from kbrl_async.lab.logistic import Features, Logistic
from kbrl_async.runs.archive.archive import FILE, Archive
from protocols.records import VERIFIER

SIZE = 1 << 16
MOST_PAIRS = 60
"""Of one problem: those with thousands would be all that is learned."""
LEAST_PAIRS = 20
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


def judged_in(runs: Sequence[Path]) -> list[JudgedKernel]:
    """Kernels of runs' training that compiled, in the order of their answers.

    :raises UserError: a folder is no run.
    """
    found = []
    for run in runs:
        if not (run / FILE).is_file():
            raise UserError(f"{run} has no archive to learn from", "Give a run folder; see 'kbrl runs'")
        with Archive(run / FILE) as archive:
            for row in archive.rows(purpose="train"):
                if not row.compiled or row.role == VERIFIER or row.reward is None:
                    continue
                if (record := archive.record(row.task_id)) is not None:
                    worth = (float(row.correct), row.lo or 0.0, row.reward)
                    found.append(JudgedKernel(record.request.problem.source, record.source, worth, row.group_id))
    return found
