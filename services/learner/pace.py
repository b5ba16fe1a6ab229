"""When a checkpoint is written: as often as the settings say, and no more than it costs."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_S = 5.0
"""What training waits for less long needs no care."""
SHARE = 0.1
"""Of the time, that training may wait for checkpoints longer than that."""


class CheckpointPace:
    """A checkpoint is due every `every` updates. It is put off while the one before is still being written, and, where
    that kept training waiting for long, until no more than `SHARE` of the time goes into them: the batches since the
    last checkpoint are on disk, so what is put off is only trained again after a crash.
    """

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._is_owed = False
        self._not_before = -float("inf")

    def is_due(self, version: int, is_saving: bool) -> bool:
        """After the update that made this version."""
        self._is_owed = self._is_owed or version % self._every == 0
        return self._is_owed and not is_saving and self._clock() >= self._not_before

    @property
    def is_put_off(self) -> bool:
        """Whether one is due and was not written, when last asked."""
        return self._is_owed

    def took(self, seconds: float) -> None:
        """One was begun, for which training waited so long."""
        self._is_owed = False
        if seconds > LONG_S:
            self._not_before = self._clock() + seconds * (1 - SHARE) / SHARE
