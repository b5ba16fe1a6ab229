"""How far apart two figures are, with the 95 % interval of the difference itself. Pure.

Two intervals that overlap do not say that there is no difference, and two values say nothing at all of chance. So
whoever compares two versions, two evaluations or two runs asks here, and says "told from chance" where the interval of
the difference leaves 0 out.

::

    the same problems twice ─ paired ──────┐
    other groups each time  ─ of_figures ──┴─▶ Difference(value, low, high)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kbrl_async.evaluation.proportions import CONFIDENCE, clustered_share

Interval = tuple[float, float]


class Delta(NamedTuple):
    """The second value minus the first one, and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_told(self) -> bool:
        """It can be told from chance: 0 is outside of the interval."""
        return self.low > 0 or self.high < 0


def of_figures(first: float, around_first: Interval | None, second: float, around: Interval | None) -> Delta | None:
    """Of two independent figures, each with its own interval over groups; None where one has none.

    MOVER (Zou & Donner, 2008), which for two shares is Newcombe's hybrid score interval (1998): each end is as far from
    the difference as the square root of both figures' own squared distances to the ends that face it. It stays honest
    at 0 and 100 %, and the groups' likeness is in it as far as it is in the figures' intervals.
    """
    if around_first is None or around is None:
        return None
    value = second - first
    low = value - math.hypot(second - around[0], around_first[1] - first)
    high = value + math.hypot(around[1] - second, first - around_first[0])
    return Delta(value, low, high)


def of_ratios(first: float, around_first: Interval | None, second: float, around: Interval | None) -> Delta | None:
    """`of_figures` of the natural logarithms, for speedups: exp of its parts are factors, such as 1.3 (1.1 … 1.6). None
    too where a figure is not above 0."""
    if around_first is None or around is None or min(first, second, *around_first, *around) <= 0:
        return None
    logs = [math.log(value) for value in (first, *around_first, second, *around)]
    return of_figures(logs[0], (logs[1], logs[2]), logs[3], (logs[4], logs[5]))


def paired(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> tuple[Delta | None, int]:
    """Of the means over the problems that both were asked, each problem weighing alike, and how many these are.

    Student's interval of the mean of the problems' own differences (scipy's `ttest_rel`): problems differ far more than
    what one problem's answers say at two times. Where all problems changed alike, which of few answers mostly means
    that none was solved either time, that interval would have no width: `of_figures` stands in for shares, and None
    for other values.
    """
    common = sorted(set(first) & set(second))
    if len(common) < 2:
        return None, len(common)
    from scipy.stats import ttest_rel  # half a second to import

    before, after = ([_mean(found[problem]) for problem in common] for found in (first, second))
    value = _mean(after) - _mean(before)
    if len({round(b - a, 12) for a, b in zip(before, after, strict=True)}) == 1:
        return _alike([[found[problem] for problem in common] for found in (first, second)]), len(common)
    interval = ttest_rel(after, before).confidence_interval(CONFIDENCE)
    return Delta(value, float(interval.low), float(interval.high)), len(common)


def _alike(asked: Sequence[Sequence[Sequence[float]]]) -> Delta | None:
    """Of two times at which every problem changed by as much."""
    if any(value not in (0, 1) for problems in asked for answers in problems for value in answers):
        return None
    hits = [[[bool(value) for value in answers] for answers in problems] for problems in asked]
    means = [_mean([_mean(answers) for answers in problems]) for problems in asked]
    return of_figures(means[0], clustered_share(hits[0]), means[1], clustered_share(hits[1]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
