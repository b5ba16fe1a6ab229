"""Weights as a safetensors file, hashed in the one pass in which it is written or read.

::

    8 bytes: length of the header │ header, JSON: name ─▶ dtype, shape, [begin, end) │ the bytes of all tensors

`safetensors` itself writes a file in one call and tells no hash: the file would be read once more for it, which takes
as long as writing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from kbrl_async.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ABOUT = "__metadata__"
PIECE_BYTES = 16 << 20
_ALIGN = 8
_MOST_HEADER = 100 << 20


class _Place(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as they lie in memory: uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8)


def _memory(content: torch.Tensor) -> memoryview:
    array: Any = content.numpy()
    return memoryview(array)


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes contiguous tensors on the CPU; the SHA-256 of the file. Needs no memory but theirs."""
    tensors = {name: tensors[name] for name in in_order((name, t.element_size()) for name, t in tensors.items())}
    places = [(name, NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]
    return write_as_they_come(path, places, tensors.items())


def in_order(sizes: Iterable[tuple[str, int]]) -> list[str]:
    """Names by the bytes of one number, in the order of `safetensors`, whose file is the same: largest numbers first,
    so that all are aligned."""
    return [name for name, _ in sorted(sizes, key=lambda item: (-item[1], item[0]))]


def write_as_they_come(
    path: Path, places: Sequence[tuple[str, str, list[int]]], named: Iterable[tuple[str, torch.Tensor]]
) -> str:
    """The same of tensors that are there one after the other. `places`: name, dtype and shape of each, in their order.

    :raises ValueError: other tensors came.
    """
    digest, expected = hashlib.sha256(), iter(places)
    with path.open("wb", buffering=0) as file:

        def put(whole: memoryview) -> None:
            for at in range(0, len(whole), PIECE_BYTES):
                part = whole[at : at + PIECE_BYTES]
                digest.update(part)
                _write_all(file, part)

        put(memoryview(_header(places)))
        for name, tensor in named:
            if next(expected, None) != (name, NAMES[tensor.dtype], list(tensor.shape)):
                raise ValueError(f"{name} is not the tensor that comes next in {path}")
            put(_memory(raw(tensor)))
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"{missing[0]} did not come for {path}")
    return digest.hexdigest()


def _write_all(file: BinaryIO, part: memoryview) -> None:
    while len(part):
        part = part[file.write(part) :]


def _header(entries: Sequence[tuple[str, str, list[int]]]) -> bytes:
    places: dict[str, _Place | dict[str, str]] = {ABOUT: {"format": "pt"}}
    at = 0
    for name, dtype, shape in entries:
        end = at + torch.Size(shape).numel() * DTYPES[dtype].itemsize
        places[name] = _Place(dtype, shape, (at, end))
        at = end
    text = msgspec.json.encode(places)
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def read(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    """The tensors of the file, which is read once and held once. CheckpointError unless it has this SHA-256."""
    cure = "Delete the version's folder and publish it again"
    try:
        content = torch.empty(path.stat().st_size, dtype=torch.uint8)
        digest, view, at = hashlib.sha256(), _memory(content), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view[at : at + PIECE_BYTES]):
                digest.update(view[at : at + count])
                at += count
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}", cure) from error
    if at != len(view) or digest.hexdigest() != sha256:
        raise CheckpointError(f"{path} differs from its manifest's SHA-256", cure)
    return _tensors(path, content)


def _tensors(path: Path, content: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the file's content."""
    view = _memory(content)
    try:
        begin = 8 + int.from_bytes(view[:8], "little")
        places = msgspec.json.decode(view[8 : min(begin, _MOST_HEADER)], type=dict[str, msgspec.Raw])
        places.pop(ABOUT, None)
        return {
            name: _tensor(content[begin:], msgspec.json.decode(place, type=_Place)) for name, place in places.items()
        }
    except (msgspec.DecodeError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}", "Publish the version again") from error


def _tensor(body: torch.Tensor, place: _Place) -> torch.Tensor:
    begin, end = place.data_offsets
    if not 0 <= begin <= end <= len(body):
        raise ValueError(f"a tensor at {begin} … {end} of {len(body)} bytes")
    dtype = DTYPES[place.dtype]
    part = body[begin:end]
    if (part.data_ptr() % dtype.itemsize) != 0:
        part = part.clone()
    return part.view(dtype).view(place.shape)
