"""A GPU with room for one arena of two: the reference's and the candidate's lie there in turns while they are timed.

::

    candidate to the host ─▶ both filled ─▶ one arena to the GPU ─▶ its call ─▶ the other ─▶ its call ─▶ compared

Whoever is moved is awake for that. So a candidate
* is on the host when fresh inputs are written, in memory that it can't reach;
* gets memory of the GPU that holds nothing; its inputs come when its process stands still again and the GPU is idle,
  and nobody may be at work there while they come;
* is timed, and has its outputs copied, before it is awake for the next move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.session import CandidateFault
from protocols.records import Fault

_OFTEN = 2
_KEEPS = "it keeps memory of the GPU that it was told to give back"


class Looks(NamedTuple):
    """Whether nobody is at work on the GPU."""

    is_alone: Callable[[], bool]
    """At this moment."""
    is_idle: Callable[[], bool]
    """Once what is at work has ended, which is waited for, but not for long."""


class BothThere:
    """The usual case: there is room for both arenas, nobody is moved, and nobody is looked for."""

    takes_turns = False
    watches = False

    def was_busy(self) -> bool:
        return False

    def park(self) -> None: ...
    def bring(self, side: object) -> None: ...
    def leave(self) -> None: ...
    def look(self) -> None: ...


class DevicePlaces:
    """Where both arenas are. Who is at work on the GPU beside them counts once `watches` is set: before, others may."""

    takes_turns = True
    watches = False

    def __init__(
        self,
        reference: CudaSession,
        candidate: CudaSession,
        has_neighbours: Callable[[], bool],
        looks: Looks,
    ) -> None:
        self._reference, self._candidate = reference, candidate
        self._has_neighbours, self._looks, self._is_busy = has_neighbours, looks, False

    def was_busy(self) -> bool:
        """Whether others were at work on the GPU, since this was asked, when somebody had been moved or called."""
        was_busy, self._is_busy = self._is_busy, False
        return was_busy

    def park(self) -> None:
        """The candidate's to the host.

        :raises CandidateFault: it gives no memory back, twice in a row where nobody else takes any.
        """
        self._candidate.move(to_host=True)
        if self._candidate.has_kept >= _OFTEN and not self._has_neighbours():
            raise CandidateFault(Fault.OUT_OF_MEMORY, _KEEPS)

    def bring(self, side: object) -> None:
        """This one's to the GPU, the other's to the host before."""
        if side is self._reference:
            self.park()
            self._reference.move(to_host=False)
        else:
            self._reference.move(to_host=True)
            self._candidate.move(to_host=False, settle=self._settle, look=self.look)
        self.look()

    def leave(self) -> None:
        """The reference's to the host, where it is between timings: the next candidate has the GPU's memory."""
        self._reference.move(to_host=True)

    def look(self) -> None:
        """Nobody is waited for: what ends in the meantime may have been at work on what has just come."""
        self._is_busy |= self.watches and not self._looks.is_alone()

    def _settle(self) -> None:
        self._is_busy |= self.watches and not self._looks.is_idle()
