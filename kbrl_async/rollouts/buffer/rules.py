"""What decides about groups and batches: settings of a run, under their names, and what no run changes."""

from __future__ import annotations

import msgspec

from kbrl_async.rollouts.rewards.advantages import NEEDS_NO_GROUP, Baseline, find_baseline
from kbrl_async.rollouts.settings import BestOfN

COMPARED = 2
"""Scored rollouts without which a group has nothing to compare."""


class BatchRules(msgspec.Struct, frozen=True):
    """How groups become samples with advantages."""

    advantage: str
    scale_advantages: bool
    """Divide a batch's advantages by their root mean square."""
    truncated: str
    """`mask`: an answer that was cut counts for its group's baseline, and is not learned from."""
    best_of_n: BestOfN

    @property
    def baseline(self) -> Baseline:
        return find_baseline(self.advantage, self.best_of_n)


class BufferRules(BatchRules, frozen=True, kw_only=True):
    """Which groups there are, and which become a batch."""

    batch_size: int
    """P."""
    max_steps: int
    max_staleness: int
    """S."""
    hold_s: float | None
    """Longest wait for a group that would become too old; None: as long as 95 % of the run's own rollouts take."""
    bench_after: int = 3
    """Failed groups in a row after which a problem is benched."""
    bench_s: float = 120.0

    @property
    def min_rollouts(self) -> int:
        """Scored rollouts without which a group teaches nothing."""
        return 1 if self.advantage in NEEDS_NO_GROUP else COMPARED
