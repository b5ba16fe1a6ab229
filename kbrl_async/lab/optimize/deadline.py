"""`--seconds` of a call: for policy, search and proof together. Without it only the search has a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.lab.optimize.search import Budget
from kbrl_async.runs.telemetry.progress import PhasePace
from kbrl_async.runs.telemetry.screen import duration

SEARCH_S = 60.0
"""Of a search, where nobody says how long everything may take."""
PROOF_SHARE, PROOF_S = 0.25, 10.0
"""Of what is left after the policy is loaded, and at most so long: kept for proving what was found."""


class Deadline:
    """Begins when it is made."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._until = float("inf") if seconds is None else clock() + seconds

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    def search_until(self) -> float:
        """When the search ends with all that it has begun, on the clock."""
        left = self._until - self._clock()
        return self._until - min(PROOF_S, PROOF_SHARE * max(0.0, left))

    def within(self, budget: Budget) -> Budget:
        """The budget, so that there is time for a proof after it."""
        if self._seconds is None:
            return msgspec.structs.replace(budget, seconds=SEARCH_S)
        return msgspec.structs.replace(budget, seconds=max(0.001, self.search_until() - self._clock()))

    def watching(self, show: Callable[[str], None]) -> Callable[[str, float], None]:
        """Hears how far the policy is, and tells it with what is left.

        The returned function raises `UserError` once it is clear that the policy will not be ready in time.
        """
        pace: PhasePace | None = None

        def report(what: str, share: float) -> None:
            nonlocal pace
            now = self._clock()
            pace = pace or PhasePace(now, share)
            left = pace.left_s(now, share)
            show(f"making the policy, once: {what}" + ("" if left is None else f", {duration(left)} left"))
            if now + (left or 0.0) >= self._until:
                raise self._too_late(left)

        return report

    def _too_late(self, left: float | None) -> UserError:
        more = "" if left is None else f": that takes {duration(left)} more"
        cause = f"the small policy can't be made within --seconds {self._seconds:g}{more}"
        return UserError(cause, "Leave --seconds out once, it is kept then; or use --policy of a run")
