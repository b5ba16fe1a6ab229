"""What a search may spend: seconds, tokens, attempts. Pure; whoever calls says what time it is."""

from __future__ import annotations

import msgspec


class Budget(msgspec.Struct, frozen=True):
    """None: no limit of that kind."""

    seconds: float | None = None
    tokens: int | None = None
    """Of answers, as the engine counts them."""
    attempts: int | None = None

    def spent(self, seconds: float, tokens: int, attempts: int) -> str:
        """What has run out (`"time"`, `"tokens"`, `"attempts"`); empty while there is something left of each."""
        if self.seconds is not None and seconds >= self.seconds:
            return "time"
        if self.tokens is not None and tokens >= self.tokens:
            return "tokens"
        return "attempts" if self.attempts is not None and attempts >= self.attempts else ""

    def share(self, seconds: float, tokens: int, attempts: int) -> float:
        """How much of it is spent, 0 … 1, by whatever runs out first."""
        pairs = ((seconds, self.seconds), (tokens, self.tokens), (attempts, self.attempts))
        return min(1.0, max((used / limit for used, limit in pairs if limit), default=0.0))
