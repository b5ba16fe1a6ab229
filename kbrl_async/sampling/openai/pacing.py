"""When the next request may go out: back-off after a failure, and a limit on requests per minute. Pure.

Invariants
* What a server asks for by Retry-After is waited for at least, by every request and not only by the refused one.
* Jitter only lengthens such a wait, so that requests that were refused together don't return together.
"""

from __future__ import annotations

import random
from email.utils import parsedate_to_datetime

FIRST_S = 0.5
MOST_S = 20.0


def back_off_s(failures: int, rng: random.Random, asked_s: float | None = None) -> float:
    """Seconds to wait after the `failures`-th failure in a row: exponential with jitter, `FIRST_S · 2ⁿ`, at most
    `MOST_S`, times a number in [½, 1]; `asked_s` is what the server asked for."""
    drawn = min(MOST_S, FIRST_S * 2.0 ** (failures - 1)) * rng.uniform(0.5, 1.0)
    return drawn if asked_s is None else asked_s + min(drawn, FIRST_S)


class Pace:
    """A limit of requests per minute: slots `60/per_minute` seconds apart, of which a few may be saved up."""

    def __init__(self, per_minute: float | None = None, burst: int = 4) -> None:
        self._interval_s = 60.0 / per_minute if per_minute else 0.0
        self._saved_s = self._interval_s * (burst - 1)
        self._next = float("-inf")
        self._closed_until = float("-inf")

    def reserve(self, now: float) -> float:
        """Takes the next slot; seconds to wait until it."""
        self._next = max(self._next, now - self._saved_s)
        at = max(self._next, self._closed_until, now)
        self._next += self._interval_s
        return at - now

    def close(self, until: float) -> None:
        """No request before `until`."""
        self._closed_until = max(self._closed_until, until)


def retry_after_s(value: str | None, now: float) -> float | None:
    """The seconds that a Retry-After header asks for, as a number or a date (RFC 9110 §10.2.3); None: it says nothing.

    `now` is the wall clock in epoch seconds.
    """
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
