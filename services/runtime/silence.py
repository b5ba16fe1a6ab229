"""What is said where a broker does not answer, with its likeliest cause."""

from __future__ import annotations

import structlog

from protocols.names import unresolved

log = structlog.get_logger()


def tell(address: str, silent_s: float, has_keys: bool) -> None:
    """One warning. May block on a name server: not for an event loop."""
    said = f"no answer from the broker at {address} for {silent_s:.0f} s"
    if reason := unresolved(address):
        log.warning(f"{said}: {reason}", cure="correct the name or this host's DNS; it is tried again all the while")
        return
    cure = "see that it runs and can be reached" + ("; is this key on its allow-list?" if has_keys else "")
    log.warning(said, cure=cure)
