"""File descriptors: each connection takes one, and libzmq aborts the process where a local one finds none left."""

from __future__ import annotations

import resource

WANTED = 65_536


def raise_descriptor_limit(wanted: int = WANTED) -> int:
    """As far as the system lets us; shells and containers often start with 1,024. Returns what may be open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft
