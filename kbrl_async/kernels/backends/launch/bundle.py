"""Several small files as one artifact: a fixed format, read strictly, because untrusted code may have written it.

::

    b"KBRLB1\\n" · msgpack [[name, bytes], …], sorted by name, each name once

Invariants
* The same files give the same bytes, so a bundle is content-addressed like any other artifact.
* A name is one plain path component: no folder, no link, nothing hidden. Sizes and counts are bounded before use.
"""

from __future__ import annotations

import re

import msgspec

MAX_FILES = 512
MAX_BYTES = 64 << 20
_MAGIC = b"KBRLB1\n"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_decode = msgspec.msgpack.Decoder(list[tuple[str, bytes]]).decode


def pack(files: dict[str, bytes]) -> bytes:
    """Raises `ValueError` for what `unpack` would refuse."""
    data = _MAGIC + msgspec.msgpack.encode(sorted(files.items()))
    unpack(data)
    return data


def unpack(data: bytes) -> dict[str, bytes]:
    """Raises `ValueError` where `data` is not a bundle, whatever it is instead.

    >>> unpack(pack({"a.json": b"{}"}))
    {'a.json': b'{}'}
    """
    if len(data) > MAX_BYTES or not data.startswith(_MAGIC):
        raise ValueError("this is no bundle of files, or it is too large")
    try:
        items = _decode(data[len(_MAGIC) :])
    except msgspec.MsgspecError as error:
        raise ValueError(f"a broken bundle of files: {error}") from error
    names = [name for name, _ in items]
    if len(names) > MAX_FILES or names != sorted(set(names)) or not all(map(_NAME.fullmatch, names)):
        raise ValueError("a bundle of files with forbidden names")
    return dict(items)
