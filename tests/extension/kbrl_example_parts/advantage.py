"""An advantage baseline: `advantage=kbrl_example_parts.advantage:over_the_median`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def over_the_median(rewards: Sequence[float]) -> list[float]:
    """r_i − median: one lucky answer does not make all the others look bad."""
    median = statistics.median(rewards)
    return [reward - median for reward in rewards]
