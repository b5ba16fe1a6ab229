"""Logistic regression on sparse counts, small enough to be fitted whenever it is asked. Pure, deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.int64]
"""Places of one example's features, each once a count."""
RATE, RIDGE = 0.3, 1e-3


class Logistic:
    """p = sigmoid(sum of weights); AdaGrad over a fixed order, with a ridge."""

    def __init__(self, size: int) -> None:
        self._weights = np.zeros(size)
        self._squares = np.full(size, 1e-6)

    def score(self, features: Features) -> float:
        return float(self._weights[features].sum())

    def fit(self, examples: Sequence[tuple[Features, Features, float]], passes: int = 5) -> None:
        """Each example is features that speak for it, features that speak against, and its share of successes."""
        order = np.random.default_rng(0)
        for _ in range(passes):
            for place in order.permutation(len(examples)):
                self._step(*examples[place])

    def _step(self, plus: Features, minus: Features, share: float) -> None:
        score = np.clip(self.score(plus) - self.score(minus), -30, 30)
        wrong = 1.0 / (1.0 + np.exp(-score)) - share
        for features, sign in ((plus, 1.0), (minus, -1.0)):
            places, counts = np.unique(features, return_counts=True)
            gradient = sign * wrong * counts + RIDGE * self._weights[places]
            self._squares[places] += gradient**2
            self._weights[places] -= RATE * gradient / np.sqrt(self._squares[places])
