"""A run in which every group fails through the infrastructure ends: it would open group after group for nothing. One
in which no group teaches anything, because all of its rewards are equal, goes on and says so.

What the end of training closes is counted as failed, too, all at once, and is not meant.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.errors import RunError
from kbrl_async.rollouts.buffer.buffer import RUN_ENDED
from kbrl_async.rollouts.buffer.events import Closed
from protocols.records import GroupOutcome

MOST = 64
"""Groups in a row."""


ADVICE = "All rewards of a group were equal: look with 'kbrl inspect'; easier problems, a better policy or sft.steps"


class FailureGuard:
    """Counts since this process began: whoever has mended the cause starts the run again and gets as many tries."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._row = self._untaught = 0

    def note(self, closed: Sequence[Closed]) -> int:
        """Groups in a row of which none was trained on, each time that `most` more have come; else 0. Raises
        `RunError` where too many in a row have failed.
        """
        told = 0
        for group in closed:
            if group.reason == RUN_ENDED:
                continue
            self._untaught = 0 if group.outcome is GroupOutcome.TRAINED else self._untaught + 1
            if self._untaught and self._untaught % self._most == 0:
                told = self._untaught
            self._row = self._row + 1 if group.outcome is GroupOutcome.FAILED else 0
            if self._row >= self._most:
                cause = f"the last {self._row} groups all failed, and not through their candidates ({group.reason})"
                cure = "Look for errors of samplers, farms and benches with 'kbrl logs'; the same command goes on then"
                raise RunError(cause, cure)
        return told
