"""Intervals by other formulas than those that they check."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
Interval = tuple[float, float] | None


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
