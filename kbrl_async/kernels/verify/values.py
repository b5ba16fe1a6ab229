"""Trees of tensors and plain values ↔ a wire form: structure here, tensors in a flat list beside it."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from kbrl_async.kernels.verify.wire import TensorMeta, Tree

_ALIGNMENT = 64
PLAIN = (bool, int, float, str, type(None))
MAX_DEPTH = 64
"""Of containers in containers."""


def flatten(value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Tree:
    """The tree of `value`; its tensors are appended to `tensors`. `TypeError` for what has no wire form."""
    if depth > MAX_DEPTH:
        raise TypeError(f"containers more than {MAX_DEPTH} deep can't be handed over")
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["T", len(tensors) - 1]
    if isinstance(value, PLAIN):
        return ["V", value]
    if isinstance(value, torch.dtype):
        return ["Y", str(value).removeprefix("torch.")]
    if isinstance(value, torch.memory_format):
        return ["F", str(value).removeprefix("torch.")]
    if isinstance(value, (list, torch.Size)) and not isinstance(value, torch.Size):
        return ["L", [flatten(item, tensors, depth + 1) for item in value]]
    if isinstance(value, tuple):
        return ["U", [flatten(item, tensors, depth + 1) for item in value]]
    if isinstance(value, dict):
        # In the order of the keys: which of them a candidate writes first must not matter.
        items = {str(key): flatten(value[key], tensors, depth + 1) for key in sorted(value, key=str)}
        if len(items) == len(value):
            return ["D", items]
        raise TypeError("two keys of a dictionary read the same")
    raise TypeError(
        f"a {type(value).__name__} can't be handed over: only tensors, numbers, strings and containers of them"
    )


def restore(tree: Tree, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `flatten`."""
    kind, body = tree
    if kind == "T":
        return tensors[body]
    if kind == "V":
        return body
    if kind in ("Y", "F"):
        return getattr(torch, body)
    if kind == "L":
        return [restore(item, tensors) for item in body]
    if kind == "U":
        return tuple(restore(item, tensors) for item in body)
    return {key: restore(item, tensors) for key, item in body.items()}


_DTYPES = frozenset(
    [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    ]
)
"""Not the quantised ones: torch itself ends where it is to see memory as one of them."""


def dtype_of(name: str) -> torch.dtype:
    """`ValueError` for a name that is no dtype of plain tensors."""
    dtype = getattr(torch, name, None) if name in _DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def memory_format_of(name: str) -> torch.memory_format:
    """`ValueError` for a name that is no memory format of torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.memory_format):
        raise ValueError(f"{name!r} is no memory format")
    return found


def describe(tensor: torch.Tensor, place: int) -> TensorMeta:
    """:raises TypeError: its type is none of those that can be told of."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"a tensor of {name} can't be handed over")
    return TensorMeta(name, tuple(tensor.shape), tensor.stride(), place, type(tensor).__name__)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where its elements fill one block of memory in some order, else a contiguous copy."""
    tensor = tensor.detach()
    block = torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta")
    return tensor if block.stride() == tensor.stride() else tensor.contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory block of a dense tensor as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def fill_bytes(tensor: torch.Tensor, byte: int) -> None:
    """Where its elements follow each other, whatever the stride of a dimension of one is; else it stays as it is."""
    if tensor.is_contiguous():
        flat(tensor).view(torch.uint8).fill_(byte)


def layout(tensors: list[torch.Tensor], start: int = 0, alignment: int = _ALIGNMENT) -> tuple[list[TensorMeta], int]:
    """Places for dense tensors one after another from `start`, aligned; and the end."""
    metas = []
    for tensor in tensors:
        metas.append(describe(tensor, start))
        start += padded(tensor.numel() * tensor.element_size(), alignment)
    return metas, start


def size_of_meta(meta: TensorMeta) -> int:
    """Bytes of its elements."""
    return math.prod(meta.shape) * dtype_of(meta.dtype).itemsize


def padded(size: int, alignment: int = _ALIGNMENT) -> int:
    """`size` bytes, rounded up."""
    return -(-size // alignment) * alignment


def view(buffer: Any, meta: TensorMeta) -> torch.Tensor:
    """The tensor that `meta` places in `buffer`, sharing memory. `buffer`: bytes, or a tensor of bytes anywhere."""
    dtype = dtype_of(meta.dtype)
    if 0 in meta.shape:
        return torch.empty(meta.shape, dtype=dtype, device=buffer.device if isinstance(buffer, torch.Tensor) else None)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.strides, strict=True))
    if isinstance(buffer, torch.Tensor):
        size = extent * dtype.itemsize
        if not 0 <= meta.place <= buffer.numel() - size:
            raise ValueError("a tensor lies outside of its arena")
        return buffer[meta.place : meta.place + size].view(dtype).as_strided(meta.shape, meta.strides)
    return torch.frombuffer(buffer, dtype=dtype, count=extent, offset=meta.place).as_strided(meta.shape, meta.strides)


def save(fd: int, tensors: list[torch.Tensor]) -> list[TensorMeta]:
    """Write tensors to a file by `write` (no mapping stays behind, so that the file can be sealed)."""
    blocks = [dense(tensor) for tensor in tensors]
    metas, end = layout(blocks)
    os.ftruncate(fd, end)
    for block, meta in zip(blocks, metas, strict=True):
        data = memoryview(flat(block).view(torch.uint8).numpy().data) if block.numel() else memoryview(b"")
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], meta.place + written)
    return metas
