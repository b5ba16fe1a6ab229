"""A run in which every group fails through the infrastructure ends: it would open group after group for nothing.

What the end of training closes is counted as failed, too, all at once, and is not meant.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.errors import RunError
from kbrl_async.rewards.events import Closed
from kbrl_async.rewards.groups import RUN_ENDED
from protocols.records import GroupOutcome

MOST = 64
"""Groups in a row."""


class Futility:
    """Counts since this process began: whoever has mended the cause starts the run again and gets as many tries."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._row = 0

    def note(self, closed: Sequence[Closed]) -> None:
        """Raises `RunError` where too many groups in a row have failed."""
        for group in closed:
            if group.reason == RUN_ENDED:
                continue
            self._row = self._row + 1 if group.outcome is GroupOutcome.FAILED else 0
            if self._row >= self._most:
                cause = f"the last {self._row} groups all failed, and not through their candidates ({group.reason})"
                cure = "Look for errors of samplers, farms and benches with 'kbrl logs'; the same command goes on then"
                raise RunError(cause, cure)
