"""How often a policy would solve a problem that it has not seen, from those of a run: to propose problems at its edge.

A problem that is always or never solved teaches nothing. So a proposer draws problems by the generator, whose checks
stand before each, and keeps those that this policy is expected to solve at times.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kbrl_async.errors import UserError
from kbrl_async.kernels.generator import chain_of
from kbrl_async.lab.logistic import Features, Logistic
from kbrl_async.runs.archive.archive import FILE, Archive
from protocols.records import VERIFIER

SIZE = 1 << 12
LOW, HIGH = 0.2, 0.8
"""Expected share of solved answers between which a problem is kept."""
PASSES = 60
BIAS, LENGTH = "bias", "length"
RECENT = 0.5
"""Share of a run's answers, the newest, that say what its policy can do now."""

Outcome = tuple[tuple[str, ...], float]
"""A problem's operations, and the share of its answers that were correct."""


class Edge:
    """Expected share of correct answers by the operations of a problem: a logistic regression."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._model = Logistic(SIZE)
        nothing = np.empty(0, np.int64)
        self._model.fit([(_features(chain), nothing, share) for chain, share in outcomes], PASSES)
        self._solved = {operation for chain, share in outcomes if share > 0 for operation in chain}

    def expected(self, chain: Sequence[str]) -> float:
        return self._model.chance(_features(chain))

    def refusal(self, chain: Sequence[str]) -> str:
        """Why a problem with these operations is left out; empty where it is at the edge."""
        if not self._solved.issuperset(chain):
            return "an operation of which nothing was solved yet"
        expected = self.expected(chain)
        if LOW <= expected <= HIGH:
            return ""
        return f"expected to be {'always' if expected > HIGH else 'never'} solved"


def _features(chain: Sequence[str]) -> Features:
    words = [BIAS, *chain, *([LENGTH] * len(chain))]
    return np.array([zlib.crc32(word.encode()) % SIZE for word in words], np.int64)


def outcomes_of(runs: Sequence[Path]) -> list[Outcome]:
    """Of the newer half of their training answers, by problem.

    :raises UserError: a folder is no run, or has no answers.
    """
    found: list[Outcome] = []
    for run in runs:
        if not (run / FILE).is_file():
            raise UserError(f"{run} has no archive to learn from", "Give a run folder; see 'kbrl runs'")
        with Archive(run / FILE) as archive:
            rows = [row for row in archive.rows(purpose="train") if row.reward is not None and row.role != VERIFIER]
            solved, sources = defaultdict[str, list[bool]](list), dict[str, str]()
            for row in rows[int(len(rows) * (1 - RECENT)) :]:
                solved[row.problem_id].append(row.correct)
                if row.problem_id not in sources and (record := archive.record(row.task_id)) is not None:
                    sources[row.problem_id] = record.request.problem.source
        found += [(chain_of(sources[p]), sum(of) / len(of)) for p, of in sorted(solved.items()) if p in sources]
    if not found:
        raise UserError("these runs hold no answers to learn from", "Give a run with a few updates")
    return found
