"""Whether long answers are dropped as too old more often than short ones, so that brevity is taught. Pure."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kbrl_async.evaluation.proportions import clustered_share
from kbrl_async.rollouts.stats import RolloutStats

PARTS = 4
LEAST = 8
"""Groups in each part below which nothing is said of a difference."""


class GroupAges(NamedTuple):
    """Of a group that has ended."""

    problem_id: str
    rollouts: int
    stale: int = 0
    """Of these, those that were dropped as too old: all of a group, or the stragglers that it went on without."""


class LengthPart(msgspec.Struct, frozen=True):
    """A quarter of the groups, by the mean length of their answers."""

    tokens: float
    """Mean length of its longest group."""
    groups: int
    share: float
    """Of its rollouts that were dropped as too old."""
    lo: float
    hi: float


def by_length(ages: Mapping[str, GroupAges], answers: Sequence[tuple[str, RolloutStats]]) -> list[LengthPart]:
    """Shortest quarter first; empty where nothing ended as too old. A group without any answer has the length of its
    problem's others; where there are none it is left out."""
    own, problem = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for group_id, stats in answers:
        own[group_id].append(stats.tokens)
        problem[stats.problem_id].append(stats.tokens)
    known = {g: own.get(g) or problem.get(ages[g].problem_id, []) for g in ages}
    ordered = sorted((g for g in ages if known[g]), key=lambda g: (_mean(known[g]), g))
    if len(ordered) < PARTS or not any(ages[g].stale for g in ordered):
        return []
    ends = [len(ordered) * part // PARTS for part in range(PARTS + 1)]
    parts = [ordered[a:b] for a, b in itertools.pairwise(ends)]
    return [_part(part, _mean(known[part[-1]]), ages) for part in parts]


def warning(parts: Sequence[LengthPart]) -> str:
    """Empty where the longest answers are dropped no more often than chance explains."""
    if not parts or parts[-1].groups < LEAST:
        return ""
    short, long = parts[0], parts[-1]
    if long.share - short.share <= math.hypot(long.share - long.lo, short.hi - short.share):
        return ""
    return (
        f"of rollouts with the longest answers {long.share:.0%} were dropped as too old, of those with the shortest "
        f"{short.share:.0%}: the policy is taught short answers. Raise hold_s or max_staleness"
    )


def _part(groups: Sequence[str], tokens: float, ages: Mapping[str, GroupAges]) -> LengthPart:
    hits = [[place < ages[g].stale for place in range(ages[g].rollouts)] for g in groups]
    share = sum(map(sum, hits)) / sum(map(len, hits))
    return LengthPart(tokens, len(groups), share, *clustered_share(hits))


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
