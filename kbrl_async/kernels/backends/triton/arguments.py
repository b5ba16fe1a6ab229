"""From what a Triton kernel is called with to the cells that the driver reads: pointers, numbers, tuples, and tensor
descriptors made on the host (with the copy engine's tensor map, or taken apart where the kernel was compiled without).
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

from kbrl_async.kernels import cuda_driver

_SCALARS: dict[str, type[Any]] = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp16": ctypes.c_uint16,
    "bf16": ctypes.c_uint16,
    "fp32": ctypes.c_float,
    "f32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_INTERLEAVE_NONE, _PROMOTE_128B = 0, 2
Fill = Callable[[Any], None]


class BoundArguments:
    """Fills the cells of one kernel's signature. `cells` stay where they are; `fill` writes new values into them."""

    def __init__(self, signature: Sequence[Any], descriptors: Sequence[Any] | None) -> None:
        self.cells: list[Any] = []
        self._descriptors = iter(descriptors or ())
        self._fills = [(place, self._of(kind)) for place, kind in enumerate(signature) if kind != "constexpr"]
        self._count = len(signature)

    def fill(self, values: Sequence[Any]) -> None:
        """:raises TypeError: as from Triton's own launcher. Values by place would otherwise go into other cells."""
        if len(values) != self._count:
            raise TypeError(
                f"a compiled kernel takes the {self._count} arguments of its signature, constexprs among them"
                f" ({len(values)} given)"
            )
        for place, fill in self._fills:
            fill(values[place])

    def _of(self, kind: Any) -> Fill:
        if isinstance(kind, tuple):
            return self._tuple(kind)
        if kind.startswith("tensordesc"):
            return self._descriptor(kind, next(self._descriptors, None))
        return self._plain(kind)

    def _cell(self, cell: Any) -> Any:
        self.cells.append(cell)
        return cell

    def _plain(self, kind: str) -> Fill:
        cell = self._cell(ctypes.c_uint64() if kind[0] == "*" else _SCALARS[kind]())
        convert = _converter(kind)

        def fill(value: Any) -> None:
            cell.value = convert(value)

        return fill

    def _tuple(self, kinds: tuple[Any, ...]) -> Fill:
        inner = [(place, self._of(kind)) for place, kind in enumerate(kinds) if kind != "constexpr"]

        def fill(value: Any) -> None:
            for place, one in inner:
                one(value[place])

        return fill

    def _descriptor(self, kind: str, meta: Any) -> Fill:
        rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
        if meta is None:
            head = [self._plain("*i8"), *(self._plain("i64") for _ in range(2 * rank)), self._plain("i1")]
        else:
            head = [self._map(meta)]
        tail = [self._plain("i32") for _ in range(rank)] + [self._plain("i64") for _ in range(rank)]

        def fill(value: Any) -> None:
            shape = [*value.shape[:-1], value.shape[-1] * 2] if meta and meta["fp4_padded"] else list(value.shape)
            first = [value] if meta else [value.base, *value.shape, *value.strides, value.padding == "nan"]
            for one, item in zip([*head, *tail], [*first, *shape, *value.strides], strict=True):
                one(item)

        return fill

    def _map(self, meta: Any) -> Fill:
        raw = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        offset = -ctypes.addressof(raw) % _MAP_ALIGNMENT
        cell = self._cell((ctypes.c_uint8 * _MAP_BYTES).from_buffer(raw, offset))
        address = ctypes.addressof(cell)

        def fill(value: Any) -> None:
            _encode(address, value, meta)

        return fill


def _encode(address: int, value: Any, meta: Any) -> None:
    """The copy engine's tensor map; sizes and strides innermost first, as the driver counts them."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    shape = [*value.shape[:-1], value.shape[-1] * 2] if meta["fp4_padded"] else list(value.shape)
    rank = len(shape)
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    strides = (ctypes.c_uint64 * rank)(*(meta["elem_size"] * stride for stride in reversed(value.strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    cuda_driver.driver().call(
        "cuTensorMapEncodeTiled",
        address,
        TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
        rank,
        pointer(value.base),
        sizes,
        strides,
        box,
        ones,
        _INTERLEAVE_NONE,
        meta["swizzle"],
        _PROMOTE_128B,
        int(value.padding == "nan"),
    )


def _converter(kind: str) -> Callable[[Any], Any]:
    if kind[0] == "*":
        return pointer
    if kind == "fp16":
        return lambda value: struct.unpack("<H", struct.pack("<e", value))[0]
    if kind == "bf16":
        return lambda value: struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    if re.fullmatch(r"f(p)?(32|64)", kind):
        return float
    return int


def pointer(value: Any) -> int:
    """A tensor's address; null for None."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    if not getattr(value, "is_cuda", True) and not value.is_pinned():  # whatever has an address: Triton asks no more
        raise ValueError("a pointer argument can't be accessed from Triton (a CPU tensor?)")
    return int(value.data_ptr())
