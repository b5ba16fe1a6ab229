"""Training answers by the policy version that wrote them, and their figures, with intervals by other formulas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from benchmarks.figures.archive import IN_TIME, ArchivedTurns, LoggedAnswer

CONFIDENCE = 0.95
Interval = tuple[float, float] | None
ENOUGH, SHARE = 64, 0.1
"""Answers that the first versions shown have, and the last ones, of which it is at least this share of all."""
SHARES = {"compile_rate": "compiled", "correct_rate": "correct", "fast_1": "fast", "fast_1_proven": "proven"}
NAMES = ("reward_mean", *SHARES, "speedup_mean")


class AnswersByVersion(NamedTuple):
    """Answers by the version that wrote their rollout's first turn; of versions that all answers are there of."""

    by: dict[int, list[LoggedAnswer]]
    left_out: int

    def of(self, versions: Iterable[int]) -> list[LoggedAnswer]:
        return [answer for version in versions for answer in self.by[version]]

    def first(self) -> list[int]:
        return self._enough(sorted(self.by)[: max(1, len(self.by) // 2)], ENOUGH)

    def last(self) -> list[int]:
        later = sorted((v for v in self.by if v > max(self.first(), default=-1)), reverse=True)
        return self._enough(later, max(ENOUGH, math.ceil(SHARE * len(self.of(self.by)))))

    def _enough(self, versions: Sequence[int], wanted: int) -> list[int]:
        before = np.cumsum([0, *(len(self.by[version]) for version in versions)])[:-1]
        return [version for version, count in zip(versions, before, strict=True) if count < wanted]


def by_version(archive: ArchivedTurns, answers: Sequence[LoggedAnswer], size: int) -> AnswersByVersion:
    wrote = {answer.rollout: answer.version for answer in sorted(answers, key=lambda a: -a.turn)}
    cut, horizon = _cut_groups(archive, answers, size)
    kept: dict[int, list[LoggedAnswer]] = defaultdict(list)
    for answer in answers:
        if answer.group not in cut and wrote[answer.rollout] < horizon:
            kept[wrote[answer.rollout]].append(answer)
    return AnswersByVersion(dict(kept), len(answers) - sum(map(len, kept.values())))


def _cut_groups(archive: ArchivedTurns, answers: Sequence[LoggedAnswer], size: int) -> tuple[set[str], float]:
    """Groups that lack answers, and the first version that may have written in those that were not too old."""
    counted = f"SELECT r.group_id, count(DISTINCT r.rollout_id) {IN_TIME} AND r.purpose = 'train' GROUP BY 1"
    there = dict(archive.db.execute(counted))
    ends = {group: (how, why) for group, how, why in archive.db.execute("SELECT group_id, outcome, reason FROM groups")}
    lacking = {group for group in {*there, *ends} if there.get(group, 0) < size}
    gone_on = {group for group in lacking if group in ends and ends[group] != ("failed", "run_ended")}
    admitted = {
        answer.group: archive.records[answer.key].admitted for answer in answers if answer.key in archive.records
    }
    behind = max((admitted[a.group] - a.version for a in answers if a.group in admitted), default=0)
    open_ = sorted(lacking - gone_on)
    oldest = [max((version for group, version in admitted.items() if group <= one), default=0) for one in open_]
    return lacking, min(oldest, default=math.inf) - max(0, behind)


def figures_of(answers: Sequence[LoggedAnswer]) -> dict[str, tuple[float | None, Interval]]:
    """Value and interval by name."""
    if not answers:
        return dict.fromkeys(NAMES, (None, None))
    rewards = _by_group((answer.group, answer.reward) for answer in answers)
    found: dict[str, tuple[float | None, Interval]] = {
        "reward_mean": (float(np.mean([a.reward for a in answers])), interval_of_mean(rewards))
    }
    for name, what in SHARES.items():
        hits = _by_group((answer.group, float(getattr(answer, what))) for answer in answers)
        found[name] = (sum(map(sum, hits)) / len(answers), interval_of_share(hits))
    logs = _by_group((a.group, math.log(a.speedup)) for a in answers if a.correct and a.speedup)
    ends = interval_of_mean(logs) if logs else None
    mean = math.exp(float(np.mean([x for group in logs for x in group]))) if logs else None
    return {**found, "speedup_mean": (mean, ends and (math.exp(ends[0]), math.exp(ends[1])))}


def _by_group(pairs: Iterable[tuple[str, float]]) -> list[list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for group, value in pairs:
        found[group].append(value)
    return list(found.values())


def turns_of(answers: Sequence[LoggedAnswer]) -> dict[str, float | None]:
    """Of rollouts of several turns: those with a correct one, their length, and compile errors that turn 2 repaired."""
    rollouts = defaultdict(list)
    for answer in sorted(answers, key=lambda a: a.turn):
        rollouts[answer.rollout].append(answer)
    pairs = [r[:2] for r in rollouts.values() if len(r) > 1 and r[0].turn == 0 and r[0].fault == "compile_error"]
    return {
        "success_rate": _mean(any(a.correct for a in r) for r in rollouts.values()),
        "avg_turns": _mean(len(r) for r in rollouts.values()),
        "compile_fix_rate": _mean(second.compiled for _, second in pairs),
    }


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


# ── intervals ─────────────────────────────────────────────────────────────────────────────────────────────────────


def wilson(share: float, tries: float, quantile: float) -> tuple[float, float]:
    """Where |share − p| is `quantile` standard errors of p: the roots of a quadratic."""
    square = quantile**2 / tries
    roots = sorted(np.roots([1 + square, -2 * share - square, share**2]).real)
    return max(0.0, float(roots[0])), min(1.0, float(roots[1]))


def spread(groups: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean of all values, groups being what was drawn: residuals of a ratio, linearised."""
    values = np.array([value for group in groups for value in group])
    residuals = np.array([np.sum(np.array(group) - values.mean()) for group in groups])
    return float(np.sqrt(len(groups) / (len(groups) - 1) * np.sum(residuals**2)) / len(values))


def interval_of_mean(groups: Sequence[Sequence[float]]) -> Interval:
    if len(groups) < 2:
        return None
    mean = float(np.mean([value for group in groups for value in group]))
    half = float(stdtrit(len(groups) - 1, (1 + CONFIDENCE) / 2)) * spread(groups)
    return mean - half, mean + half


def interval_of_share(groups: Sequence[Sequence[float]]) -> Interval:
    total = sum(map(len, groups))
    share = sum(map(sum, groups)) / total
    if len(groups) < 2:
        return wilson(share, 1, float(ndtri((1 + CONFIDENCE) / 2)))
    error, independent = spread(groups), math.sqrt(share * (1 - share) / total)
    tries = total * min(1.0, (independent / error) ** 2) if error else float(total)
    return wilson(share, tries, float(stdtrit(len(groups) - 1, (1 + CONFIDENCE) / 2)))
