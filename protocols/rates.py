"""A token bucket: how much of something is allowed over time. Pure; the caller brings the clock."""

from __future__ import annotations


class TokenBucket:
    """`rate` tokens a second, at most `burst` of them saved up; full at the start.

    Example::

        bucket = TokenBucket(rate=2.0, burst=3.0)
        [bucket.take(1.0, now=0.0) for _ in range(4)]   # True, True, True, False
        bucket.take(1.0, now=0.5)                       # True
    """

    def __init__(self, rate: float, burst: float) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError(f"rate={rate} and burst={burst} must be above 0")
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at: float | None = None

    def take(self, amount: float, now: float) -> bool:
        """Take `amount`, or nothing where there is less. A clock that steps back gives nothing and costs nothing.

        More than a full bucket is never allowed.
        """
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._tokens = min(self._burst, self._tokens + passed * self._rate)
        if amount > self._tokens:
            return False
        self._tokens -= amount
        return True
