"""How extensions were built: written behind the name of the toolchain by who builds, read from it by who counts.

>>> ways(joined([named("g++ 12", ""), named("g++ 12", "asks for gradients")]))
('fast', 'asks for gradients')
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FAST = "fast"
_WAY = re.compile(r" (?:(fast)|full: ([^;]+))(?=; |$)")


def named(toolchain: str, why_full: str) -> str:
    """`why_full`: why the fast way was not enough; empty where it was."""
    return f"{toolchain} full: {why_full.replace(';', ',')}" if why_full else f"{toolchain} {FAST}"


def joined(toolchains: Iterable[str]) -> str:
    """Of several extensions: each name once."""
    return "; ".join(dict.fromkeys(filter(None, toolchains)))


def ways(toolchain: str) -> tuple[str, ...]:
    """`fast`, or why it was built in full, of each extension that was built otherwise than the others."""
    return tuple(fast or why for fast, why in _WAY.findall(toolchain))
