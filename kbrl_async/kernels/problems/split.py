"""Which problems of a source without a split are held out: a seeded share of each level. Pure.

Invariants
* A source that marks problems itself is left as it is.
* The choice depends on the problem's id, the level's size and the seed alone: it is the same whichever levels are
  trained on, and a problem that is added moves at most one other.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from kbrl_async.kernels.settings import HELDOUT_SEED, HELDOUT_SHARE
from protocols.records import Problem

HELDOUT = "heldout"


class Split(msgspec.Struct, frozen=True):
    """How a source without a split of its own is split."""

    share: float = HELDOUT_SHARE
    """Of each level, rounded down: of fewer than 1 / share problems none is held out."""
    seed: int = HELDOUT_SEED


def with_split(problems: Sequence[Problem], split: Split) -> list[Problem]:
    """The same problems in the same order, `share` of each level held out where none was."""
    if any(problem.split == HELDOUT for problem in problems):
        return list(problems)
    by_level: dict[int, list[str]] = defaultdict(list)
    for problem in problems:
        by_level[problem.level].append(problem.problem_id)
    held = {id_ for ids in by_level.values() for id_ in _drawn(ids, split)}
    return [msgspec.structs.replace(p, split=HELDOUT) if p.problem_id in held else p for p in problems]


def _drawn(ids: Sequence[str], split: Split) -> list[str]:
    def rank(problem_id: str) -> bytes:
        return hashlib.blake2b(f"{split.seed}.{problem_id}".encode(), digest_size=8).digest()

    return sorted(ids, key=rank)[: int(split.share * len(ids) + 1e-9)]
