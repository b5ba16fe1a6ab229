"""What the policy was worth, version by version: the one place where training answers become figures. Pure.

::

    answers + what became of their groups ─ settled ─▶ versions whose answers are all in ─┬─ ends ──▶ first and last
                                               └─▶ left out, counted                      └─ points ─▶ a curve

Failures are scored at once, correct kernels wait for the bench. So whatever goes by the time of scoring, or looks at
groups that have not ended, shows a policy that gets better although it never changes.

Invariants
* An answer counts for the version that wrote it (a later turn for the version that wrote its rollout's first turn: who
  gets a second turn depends on the first), whenever it was scored: the order of the answers changes no figure.
* Answers of groups that lack some of theirs are left out, and so is every version that may have written in a group that
  the end of the run cut off, or that is still open. How many they are is said.
* What infrastructure lost is no answer; it is counted beside them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kbrl_async.evaluation.proportions import KEY, clustered_mean, clustered_share
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry.stale import GroupAges
from kbrl_async.runs.telemetry.training_metrics import (
    geometric_mean,
    kernels,
    mean,
    speedups,
    turn_summary,
    version_scalars,
)

LEAST = 64
"""Answers from which on a share is compared: eight groups of the default size."""
SHARE = 0.1
"""Of all answers that the last versions' should be, in a long run."""
MOST_POINTS = 100
SHARES = {"compile_rate": "compiled", "correct_rate": "correct", "fast_1": "fast_1", "fast_1_proven": "fast_1_proven"}
"""By name: what an answer has to be."""
FIELDS = ("reward_mean", *SHARES, "speedup_mean")


STALE = "stale"
"""Why a rollout was lost that was too old when it would have been dispatched."""


class ScoredAnswer(NamedTuple):
    """One scored turn and its group."""

    group_id: str
    stats: RolloutStats


class Answers(msgspec.Struct, frozen=True):
    """The training answers of a run, and which of their groups lack some."""

    listed: Sequence[ScoredAnswer] = ()
    """In any order."""
    unfinished: Mapping[str, int] = {}
    """Groups that are open or that the run's end cut off: the oldest version that what they lack may be of."""
    dropped: frozenset[str] = frozenset()
    """Groups that were dropped as too old before all of their rollouts had ended."""
    lost: Mapping[str, int] = {}
    """Rollouts that infrastructure lost, by reason."""
    ages: Mapping[str, GroupAges] = {}
    """Groups of which nothing is awaited any more: how many of their rollouts were dropped as too old."""

    @property
    def stats(self) -> list[RolloutStats]:
        return [answer.stats for answer in self.listed]


class VersionFigure(NamedTuple):
    """A mean over answers; its interval is None where there are too few groups for one."""

    value: float
    interval: tuple[float, float] | None


class VersionRange(msgspec.Struct, frozen=True):
    """Every answer of some versions in a row."""

    first: int
    last: int
    answers: Sequence[ScoredAnswer]

    @property
    def stats(self) -> list[RolloutStats]:
        return [answer.stats for answer in self.answers]

    @property
    def versions(self) -> str:
        return f"version {self.first}" if self.first == self.last else f"versions {self.first}–{self.last}"

    @property
    def middle(self) -> float:
        """Where it stands on an axis of versions."""
        return (self.first + self.last) / 2

    def figures(self) -> dict[str, VersionFigure]:
        """Those of `FIELDS` that there are answers for; `speedup_mean` is the geometric mean of correct kernels."""
        groups: dict[str, list[RolloutStats]] = defaultdict(list)
        for answer in self.answers:
            groups[answer.group_id].append(answer.stats)
        members = list(groups.values())
        if not members:
            return {}
        rewards = [[s.reward for s in group] for group in members]
        found = {"reward_mean": VersionFigure(_mean(rewards), clustered_mean(rewards))}
        for name, flag in SHARES.items():
            hits = [[bool(getattr(s, flag)) for s in group] for group in members]
            found[name] = VersionFigure(_mean(hits), clustered_share(hits))
        mean_speedup = geometric_mean(speedups(self.stats))
        return (
            found
            if mean_speedup is None
            else {**found, "speedup_mean": VersionFigure(mean_speedup, speed_interval(members))}
        )


def speed_interval(groups: Iterable[Sequence[RolloutStats]]) -> tuple[float, float] | None:
    """Of the geometric mean of correct kernels' speedups; None where fewer than two groups have any."""
    logs = [[math.log(speedup) for speedup in speedups(group)] for group in groups]
    interval = clustered_mean([group for group in logs if group])
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))


def scalars(part: VersionRange, *, per_level: bool) -> dict[str, float]:
    """TensorBoard tag → value of one version, with the ends of the intervals."""
    values = version_scalars(part.stats, per_level=per_level)
    for name, figure in part.figures().items():
        if figure.interval is not None:
            values[f"version/{name}_lo"], values[f"version/{name}_hi"] = figure.interval
    return values


class Settled(msgspec.Struct, frozen=True):
    """Answers by version, and those that are left out."""

    versions: dict[int, list[ScoredAnswer]]
    """Of versions all of whose answers are in, in ascending order."""
    unfinished: int = 0
    """Answers of groups that are open or were cut off."""
    later: int = 0
    """Answers of whole groups by versions that wrote in such groups, too: the quick groups of those versions."""
    horizon: int | None = None
    """The first such version."""
    dropped: int = 0
    """Answers of groups that were dropped as too old, without all of theirs."""
    has_turns: bool = False


class Ends(msgspec.Struct, frozen=True):
    """The first versions and the last; None where there are no answers for it."""

    first: VersionRange | None
    last: VersionRange | None


def settled(answers: Answers) -> Settled:
    """Answers that wrote a kernel, by the version that wrote their rollout's first turn."""
    wrote = [ScoredAnswer(a.group_id, s) for a in answers.listed for s in kernels([a.stats])]
    version = _versions(wrote)
    horizon = min(answers.unfinished.values(), default=None)
    versions: dict[int, list[ScoredAnswer]] = defaultdict(list)
    left: Counter[str] = Counter()
    for answer in wrote:
        if answer.group_id in answers.unfinished:
            left["unfinished"] += 1
        elif answer.group_id in answers.dropped:
            left["dropped"] += 1
        elif horizon is not None and version(answer) >= horizon:
            left["later"] += 1
        else:
            versions[version(answer)].append(answer)
    has_turns = any(answer.stats.turn for answer in wrote)
    return Settled(dict(sorted(versions.items())), horizon=horizon, has_turns=has_turns, **left)


def _versions(answers: Sequence[ScoredAnswer]) -> Callable[[ScoredAnswer], int]:
    """A function from an answer to the version that it counts for."""
    first: dict[str, RolloutStats] = {}
    for _, stats in answers:
        known = first.get(stats.rollout_id)
        if stats.rollout_id and (known is None or stats.turn < known.turn):
            first[stats.rollout_id] = stats
    return lambda answer: first.get(answer.stats.rollout_id, answer.stats).policy_version


def ends(found: Settled) -> Ends:
    """The lowest versions with `LEAST` answers, and the highest with as many, or `SHARE` of all where that is more.

    They never share a version; of few answers each gets at most those of its side.
    """
    versions = list(found.versions)
    if not versions:
        return Ends(None, None)
    wanted = max(LEAST, math.ceil(SHARE * sum(map(len, found.versions.values()))))
    first = _gathered(found, versions[: max(1, len(versions) // 2)], LEAST)
    last = _gathered(found, [v for v in reversed(versions) if v > first[-1]], wanted)
    return Ends(_part(found, first), _part(found, sorted(last)) if last else None)


def _gathered(found: Settled, versions: Sequence[int], wanted: int) -> list[int]:
    taken: list[int] = []
    while len(taken) < len(versions) and sum(len(found.versions[v]) for v in taken) < wanted:
        taken.append(versions[len(taken)])
    return taken


def _part(found: Settled, versions: Sequence[int]) -> VersionRange:
    return VersionRange(versions[0], versions[-1], [answer for v in versions for answer in found.versions[v]])


def points(found: Settled, most: int = MOST_POINTS, least: int = 1) -> list[VersionRange]:
    """A curve over versions: neighbours together until each point but the last has `least` answers, and at most `most`
    points are left."""
    versions = list(found.versions)
    size = -(-len(versions) // most) if versions else 1
    parts: list[list[int]] = []
    for version in versions:
        if not parts or (len(parts[-1]) >= size and sum(len(found.versions[v]) for v in parts[-1]) >= least):
            parts.append([])
        parts[-1].append(version)
    if len(parts) > 1 and sum(len(found.versions[v]) for v in parts[-1]) < least / 2:
        parts[-2:] = [parts[-2] + parts[-1]]
    return [_part(found, part) for part in parts]


# ── in words, and for summary.json ────────────────────────────────────────────────────────────────────────────────


def sentence(answers: Answers, found: Settled) -> str:
    """Which answers are in the first and the last figure, and which in none. The same wherever they are shown."""
    two = ends(found)
    parts = [f"{name}: {_described(part)}" for name, part in (("First", two.first), ("last", two.last)) if part]
    said = "; ".join(parts) or "No version has all of its answers yet"
    if two.first and not two.last:
        said += "; no later version has all of its answers"
    turns = ", by the version that wrote a rollout's first turn" if found.has_turns else ""
    left = [
        (found.unfinished, "of groups that had not ended"),
        (found.later, f"of version {found.horizon} and later, which wrote in such groups, too"),
        (found.dropped, "of groups that were dropped as too old before they were complete"),
    ]
    told = [f"{count} {words}" for count, words in left if count]
    out = f" Left out: {', '.join(told)}." if told else ""
    lost = ", ".join(f"{count} {reason}" for reason, count in sorted(answers.lost.items()))
    return f"{said}{turns}.{out}{f' Lost by infrastructure, so no answers: {lost}.' if lost else ''}"


def _described(part: VersionRange) -> str:
    groups = len({answer.group_id for answer in part.answers})
    return f"{_counted(len(part.answers), 'answer')} of {part.versions} ({_counted(groups, 'group')})"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def fields(answers: Answers) -> dict[str, Any]:
    """For `summary.json`: each figure of the first and the last versions with its interval (`KEY`), which versions and
    how many answers they are of, the sentence that says so, and the curve."""
    found = settled(answers)
    two = ends(found)
    return {
        **_fields(two.first, "first"),
        **_fields(two.last, "last"),
        "first_and_last": sentence(answers, found),
        "answers_left_out": found.unfinished + found.later + found.dropped,
        "rollouts_lost": dict(answers.lost),
        **turn_summary(_stats(two.first), _stats(two.last), _all(found)),
        "by_version": [_point(part) for part in points(found)],
    }


def _stats(part: VersionRange | None) -> list[RolloutStats]:
    return part.stats if part else []


def _all(found: Settled) -> list[RolloutStats]:
    return [answer.stats for answers in found.versions.values() for answer in answers]


def _fields(part: VersionRange | None, which: str) -> dict[str, Any]:
    figures = part.figures() if part else {}
    empty = VersionFigure(math.nan, None)
    values = {f"{name}_{which}": figures[name].value if name in figures else None for name in FIELDS}
    ends_of = {name: figures.get(name, empty).interval for name in FIELDS}
    intervals = {f"{name}_{which}{KEY}": list(pair) if pair else None for name, pair in ends_of.items()}
    versions = [part.first, part.last] if part else None
    return {**values, **intervals, f"versions_{which}": versions, f"answers_{which}": len(part.answers) if part else 0}


def _point(part: VersionRange) -> dict[str, Any]:
    figures = {name: figure.value for name, figure in part.figures().items()}
    return {"versions": [part.first, part.last], "answers": len(part.answers), **figures}


def _mean(groups: Sequence[Sequence[float]]) -> float:
    return mean(value for group in groups for value in group) or 0.0


# ── from the events of the rollout buffer ────────────────────────────────────────────────────────────────────────────


class Tally:
    """Answers and what became of their groups, from a journal's entries in their order."""

    def __init__(self) -> None:
        self._listed: list[ScoredAnswer] = []
        self._awaited: dict[str, int] = {}
        self._admitted: dict[str, int] = {}
        self._behind = 0
        """Most versions that a sampler was behind the learner when a group was admitted."""
        self._dropped: set[str] = set()
        self._lost: Counter[str] = Counter()
        self._ages: dict[str, GroupAges] = {}

    def admitted(self, group_id: str, rollouts: int, version: int, problem_id: str = "") -> None:
        self._awaited[group_id], self._admitted[group_id] = rollouts, version
        self._ages[group_id] = GroupAges(problem_id, rollouts)

    def answered(self, group_id: str, stats: RolloutStats) -> None:
        self._listed.append(ScoredAnswer(group_id, stats))
        self._behind = max(self._behind, self._admitted.get(group_id, 0) - stats.policy_version)

    def ended(self, group_id: str, lost: str = "") -> None:
        """A rollout of the group; `lost`: why it has no reward."""
        if lost:
            self._lost[lost] += 1
        if lost == STALE and (ages := self._ages.get(group_id)) is not None:
            self._ages[group_id] = ages._replace(stale=ages.stale + 1)
        self._awaited[group_id] = self._awaited.get(group_id, 0) - 1
        if self._awaited[group_id] <= 0:
            del self._awaited[group_id]

    def swept(self, group_ids: Sequence[str], *, whole: bool = True) -> None:
        """Dropped as too old; not `whole`: gone on without some of their answers."""
        for group_id in group_ids:
            if (ages := self._ages.get(group_id)) is not None:
                stale = ages.rollouts if whole else ages.stale + self._awaited.get(group_id, 0)
                self._ages[group_id] = ages._replace(stale=stale)
        self._dropped |= {group_id for group_id in group_ids if self._awaited.pop(group_id, 0) > 0}

    def answers(self) -> Answers:
        """A group's answers may be older than its admission, where a sampler was behind the learner; what a group lacks
        is taken to be as much older as any answer of the run was."""
        ended = {group_id: ages for group_id, ages in self._ages.items() if group_id not in self._awaited}
        oldest = {group_id: self._admitted.get(group_id, 0) - self._behind for group_id in self._awaited}
        return Answers(self._listed, oldest, frozenset(self._dropped), dict(self._lost), ended)

    def horizon(self, newest: float) -> float:
        """The first version that an open group may still write in, or one that is admitted at `newest` or later."""
        return min([newest, *(self._admitted.get(group_id, 0) for group_id in self._awaited)]) - self._behind

    def forget(self, horizon: float) -> None:
        """Answers that count for versions before, and groups that nothing is awaited of any more."""
        version = _versions(self._listed)
        self._listed = [a for a in self._listed if version(a) >= horizon or a.group_id in self._awaited]
        left = {answer.group_id for answer in self._listed} | self._awaited.keys()
        self._admitted = {group_id: version for group_id, version in self._admitted.items() if group_id in left}
        self._dropped &= left
        self._ages = {group_id: ages for group_id, ages in self._ages.items() if group_id in left}
