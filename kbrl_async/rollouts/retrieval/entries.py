"""One worked example: a reference module and a kernel that replaced it. Plus the limits every corpus is held to."""

from __future__ import annotations

import hashlib
import math

import msgspec

MAX_REFERENCE = 50_000
MAX_KERNEL = 100_000
"""Characters. Longer rows are dropped; nothing is ever cut."""

BACKENDS = ("other", "c", "cpp", "cuda", "cuda-nvrtc", "triton")
"""By position in the index: append only."""

FAMILIES = {"cuda-nvrtc": "cuda", "cpp": "c"}
"""Backends whose kernels read alike."""


class Skip(ValueError):  # noqa: N818 - it is no error: a row is left out and counted
    """A row that is left out; `reason` is a phrase to count by."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Entry(msgspec.Struct, frozen=True):
    """One example as it is stored, one JSON line each."""

    uid: str
    """Stable name, such as `kernelbook:1f3a…`."""
    corpus: str
    reference: str
    kernel: str
    backend: str
    problem_id: str = ""
    """`"L1/01_tanh"` where the corpus knows it."""
    level: int = 0
    speedup: float | None = None
    """Reference time over kernel time; the lower end of the interval where there is one."""
    verified: bool = False
    """Somebody ran it and found it correct."""
    license: str = ""
    origin: str = ""
    """Repository, file or run."""


def checked(entry: Entry) -> Entry:
    """The entry, if it may be stored. Raises `Skip`."""
    for name, text, limit in (("reference", entry.reference, MAX_REFERENCE), ("kernel", entry.kernel, MAX_KERNEL)):
        if not text.strip():
            raise Skip(f"{name} is empty")
        if len(text) > limit:
            raise Skip(f"{name} is too long")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Skip("not UTF-8") from None
    if entry.speedup is not None and not (math.isfinite(entry.speedup) and entry.speedup > 0):
        return msgspec.structs.replace(entry, speedup=None)
    return entry


def digest(*texts: str) -> str:
    """Sixteen hex digits that name a content."""
    return hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
