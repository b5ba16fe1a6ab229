"""Re-ranking by backend, verified speedup and diversity. Pure.

    relevance = similarity + backend + verified + speed
    picked    = argmax over what is left of  relevance − diversity · (largest similarity to what is picked already)

The second line is maximal marginal relevance (Carbonell & Goldstein, 1998): three examples that say the same teach one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kbrl_async.rollouts.retrieval.embedders import Vectors
from kbrl_async.rollouts.retrieval.entries import FAMILIES


class RankOptions(msgspec.Struct, frozen=True):
    """Weights, in units of similarity."""

    backend: float = 0.2
    """For an example of the asked-for backend; half for one of its family."""
    verified: float = 0.05
    speed: float = 0.1
    """For a verified speedup of 8× or more; logarithmic below, negative for slower kernels."""
    diversity: float = 0.3


DEFAULT = RankOptions()


class Rankable(msgspec.Struct, frozen=True):
    """What ranking knows of an example."""

    similarity: float
    backend: str
    verified: bool
    speedup: float | None
    reference: int
    """Equal for examples of one reference, of which one is picked at most."""


class Ranked(msgspec.Struct, frozen=True):
    """A picked candidate, and the parts that its score is the sum of."""

    position: int
    score: float
    parts: dict[str, float]


def rank(
    candidates: Sequence[Rankable], vectors: Vectors, k: int, backend: str = "", options: RankOptions = DEFAULT
) -> list[Ranked]:
    """The best `k`, best first; ties go to the earlier candidate. `vectors`: one row per candidate."""
    parts = [_parts(candidate, backend, options) for candidate in candidates]
    likeness = [0.0] * len(candidates)
    left = dict.fromkeys(range(len(candidates)))
    picked: list[Ranked] = []
    while left and len(picked) < k:
        scores = {place: math.fsum(parts[place].values()) - options.diversity * likeness[place] for place in left}
        best = max(left, key=lambda place: (scores[place], -place))
        shown = {**parts[best], "diversity": -options.diversity * likeness[best]}
        picked.append(Ranked(best, scores[best], shown))
        left = {p: None for p in left if candidates[p].reference != candidates[best].reference}
        for place in left:
            likeness[place] = max(likeness[place], float(vectors[place] @ vectors[best]))
    return picked


def _parts(candidate: Rankable, backend: str, options: RankOptions) -> dict[str, float]:
    return {
        "similarity": candidate.similarity,
        "backend": options.backend * kinship(candidate.backend, backend),
        "verified": options.verified * candidate.verified,
        "speed": options.speed * speed_part(candidate.speedup) if candidate.verified else 0.0,
    }


def kinship(backend: str, wanted: str) -> float:
    """1 for the same backend, or where none is wanted; ½ within a family; else 0."""
    if not wanted or backend == wanted:
        return 1.0
    return 0.5 if FAMILIES.get(backend, backend) == FAMILIES.get(wanted, wanted) else 0.0


def speed_part(speedup: float | None) -> float:
    """−1 … 1 for 1/8 … 8×, logarithmic, like the reward for speed."""
    return 0.0 if speedup is None or speedup <= 0 else max(-1.0, min(1.0, math.log(speedup, 8)))
