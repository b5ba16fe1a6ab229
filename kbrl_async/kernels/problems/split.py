"""Which problems of a source without a split are held out: a seeded share of each level, whole families. Pure.

Invariants
* A source that marks problems itself is left as it is.
* The choice depends on a level's problems and the seed alone: it is the same whichever levels are trained on.
* By family, problems of a level that compute with the same operations are on the same side; where one family is more
  than may be held out, as in a folder of one kind of problem, it goes by problem.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from kbrl_async.kernels.settings import HELDOUT_KIND, HELDOUT_SEED, HELDOUT_SHARE, SplitKind
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope, Unreadable
from protocols.records import Problem

HELDOUT = "heldout"
INSTANCE, FAMILY = "instance", "family"
"""What is held out: another problem of a family that is trained on, or the whole family."""
_SIMPLE = frozenset({"add", "sub", "mul", "div", "view", "reshape", "transpose", "contiguous"})
"""Operations that make no family of their own, beside others."""

_DIMENSIONS = re.compile(r"\dd$")
"""Of a pooling or a convolution."""


class Split(msgspec.Struct, frozen=True):
    """How a source without a split of its own is split."""

    share: float = HELDOUT_SHARE
    """Of each level, rounded down: of fewer than 1 / share problems none is held out."""
    seed: int = HELDOUT_SEED
    kind: SplitKind = HELDOUT_KIND


def with_split(problems: Sequence[Problem], split: Split) -> list[Problem]:
    """The same problems in the same order, `share` of each level held out where none was."""
    if split.kind == "none":
        return [msgspec.structs.replace(p, split="train") if p.split == HELDOUT else p for p in problems]
    if any(problem.split == HELDOUT for problem in problems):
        return list(problems)
    by_level: dict[int, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_level[problem.level].append(problem)
    held = {id_ for level in by_level.values() for id_ in _held(level, split)}
    return [msgspec.structs.replace(p, split=HELDOUT) if p.problem_id in held else p for p in problems]


def _held(level: Sequence[Problem], split: Split) -> list[str]:
    room = int(split.share * len(level) + 1e-9)
    families = _families(level) if split.kind == "family" else {}
    found: list[str] = []
    for name in _ranked(families, split):
        if len(found) + len(families[name]) <= room:
            found += families[name]
    return found or _ranked([problem.problem_id for problem in level], split)[:room]


def _families(level: Sequence[Problem]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for problem in level:
        found[family_of(problem)].append(problem.problem_id)
    return found


def family_of(problem: Problem) -> str:
    """What it computes with, in words; its own id where that can't be read."""
    try:
        names = {_DIMENSIONS.sub("", name) for name in operations(Scope(problem.source, "Model"))}
    except (Unreadable, RecursionError):
        return problem.problem_id
    return " ".join(sorted(names - _SIMPLE or names)) or problem.problem_id


def held_out_kinds(problems: Iterable[Problem]) -> dict[str, str]:
    """Of each held-out problem, `INSTANCE` or `FAMILY`: whether one that is trained on computes with the same."""
    listed = list(problems)
    trained = {family_of(problem) for problem in listed if problem.split != HELDOUT}
    held = [problem for problem in listed if problem.split == HELDOUT]
    return {problem.problem_id: INSTANCE if family_of(problem) in trained else FAMILY for problem in held}


def _ranked(names: Iterable[str], split: Split) -> list[str]:
    def rank(name: str) -> bytes:
        return hashlib.blake2b(f"{split.seed}.{name}".encode(), digest_size=8).digest()

    return sorted(names, key=rank)
