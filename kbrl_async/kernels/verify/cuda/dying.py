"""Children that were killed and may take their time: the driver needs a tenth of a second or more for a context."""

from __future__ import annotations

import signal

from kbrl_async.kernels.sandbox import Child


class Dying:
    """Nobody waits for them but `close`."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def add(self, child: Child) -> None:
        """It is killed; returns at once."""
        child.signal(signal.SIGKILL)
        if child not in self._children:
            self._children.append(child)
        for ended in [child for child in self._children if child.has_ended()]:
            self._children.remove(ended)
            ended.close()

    def close(self) -> None:
        """Returns when all have ended."""
        while self._children:
            self._children.pop().close()
