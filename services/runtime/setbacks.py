"""How long a worker waits before it gives a task back, when task after task fails through no candidate's fault. Pure.

A worker whose device has died fails a task in a millisecond. Without a wait it would use up every attempt of every
rollout there is, those too that the worker beside it could have done.
"""

from __future__ import annotations

FIRST_S, MOST_S = 0.1, 10.0


class Setbacks:
    """`free` failures in a row cost nothing: what takes a sandbox or an engine away takes all that runs in it."""

    def __init__(self, free: int) -> None:
        self._free = free
        self.row = 0
        """Tasks that failed one after the other."""

    def worked(self) -> None:
        """A task was done: what failed before was something else."""
        self.row = 0

    def failed(self) -> float:
        """Seconds until this failure is told.

        >>> setbacks = Setbacks(free=2)
        >>> [setbacks.failed() for _ in range(5)]
        [0.0, 0.0, 0.1, 0.2, 0.4]
        """
        self.row += 1
        beyond = self.row - self._free
        return 0.0 if beyond < 1 else min(MOST_S, FIRST_S * 2.0 ** min(beyond - 1, 30))

    @property
    def is_worth_telling(self) -> bool:
        """The first of a row, and whenever there are twice as many: a log that a night of them does not fill."""
        return self.row.bit_count() == 1
