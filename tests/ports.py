"""Ports for servers that have to be told one: free, and outside of those that the kernel gives to whoever asks for any.

A port that was bound to 0 and closed again may be another test's connection a moment later.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000
_ANY = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    end = int(_ANY.read_text().split()[0]) if _ANY.exists() else 32_768
    for port in random.SystemRandom().sample(range(min(_FIRST, end - 1000), end), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a hundred ports are taken")
