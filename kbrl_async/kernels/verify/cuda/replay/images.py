"""Built artifacts → images that the driver loads: the cubins of a bundle, the fat binaries of a shared object.

Pure functions of bytes that untrusted code may have written; an image is named by the sha256 of the cubin, or of the
whole shared object.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kbrl_async.kernels.backends.launch import bundle, elf

_ELF = b"\x7fELF"
_MAX_PARTS = 256
_FROM_HOST = ("cudaMemcpyToSymbol", "cudaMemcpyFromSymbol", "cudaGetSymbolAddress", "cuModuleGetGlobal")


class Unloadable(Exception):  # noqa: N818 - an answer, not an error
    """Why what was built can't be loaded without its host code."""


class Image(msgspec.Struct, frozen=True):
    """What a launch names: one cubin, or all fat binaries of one shared object."""

    digest: str
    parts: list[bytes]


def images(paths: Iterable[Path]) -> list[Image]:
    """Of all artifacts of one candidate.

    :raises Unloadable: one of them needs its host code.
    """
    found: dict[str, Image] = {}
    for path in paths:
        for image in _of(path.read_bytes()):
            found[image.digest] = image
    return list(found.values())


def _of(data: bytes) -> list[Image]:
    if data.startswith(_ELF):
        return [_of_shared_object(data)]
    try:
        files = bundle.unpack(data)
    except ValueError as error:
        raise Unloadable(f"an artifact is neither a bundle nor a shared object: {error}") from None
    return [Image(_digest(content), [content]) for content in files.values() if content.startswith(_ELF)]


def _of_shared_object(data: bytes) -> Image:
    try:
        names = elf.needed_names(data)
        parts = elf.fatbins(data)
    except (ValueError, struct.error, IndexError) as error:
        raise Unloadable(f"a shared object that can't be read: {error}") from None
    for name in names:
        if name.startswith(_FROM_HOST):
            raise Unloadable(f"its host code sets variables on the device ({name})")
    return Image(_digest(data), parts[:_MAX_PARTS])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
