"""Names of hosts in addresses.

libzmq looks a name up at every attempt to connect, so a worker joins by itself once its broker's name is known; but it
says nothing of a name that is not.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

Lookup = Callable[..., Any]


def unresolved(address: str, lookup: Lookup = socket.getaddrinfo) -> str:
    """What is wrong with the name in a TCP address; empty where it is known, or where the address has none.

    Blocks as long as a name server does not answer: not for an event loop.
    """
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or not host:
        return ""
    try:
        lookup(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"the name {host} can't be resolved: {error.strerror or error}"
    return ""
