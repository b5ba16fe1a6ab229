"""A GPU with room for one arena of two: the reference's and the candidate's lie there in turns while they are timed.

::

    candidate to the host ─▶ both filled ─▶ one arena to the GPU ─▶ its call ─▶ the other ─▶ its call ─▶ compared

Whoever is moved is awake for that. So a candidate
* is on the host when fresh inputs are written, in memory that it can't reach;
* gets memory of the GPU that holds nothing; its inputs come when its process stands still again and the GPU is idle;
* is timed, and has its outputs copied, before it is awake for the next move.
"""

from __future__ import annotations

from collections.abc import Callable

from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.session import CandidateFault
from protocols.records import Fault

_OFTEN = 2
_KEEPS = "it keeps memory of the GPU that it was told to give back"


class DevicePlaces:
    """Where both arenas are. `is_busy`: others were at work on the GPU when somebody had been moved."""

    def __init__(
        self,
        reference: CudaSession,
        candidate: CudaSession,
        has_neighbours: Callable[[], bool],
        is_idle: Callable[[], bool],
    ) -> None:
        """`is_idle` waits for the end of what is at work, for a while, and says whether it came."""
        self._reference, self._candidate = reference, candidate
        self._has_neighbours, self._is_idle, self.is_busy = has_neighbours, is_idle, False

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
            self._candidate.move(to_host=False, settle=self._settle)
        self._settle()

    def _settle(self) -> None:
        self.is_busy |= not self._is_idle()
