"""Reading a shared object: what it defines, what it leaves to others, and the machine code for a GPU that it brings.
64-bit little-endian ELF only.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Any

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB, _DYNSYM, _LOAD, _THREAD_LOCAL, _OBJECT, _FUNCTION = 2, 11, 1, 7, 1, 2
_GLOBAL = b".nv.global"
_RELOCATED, _WRITABLE = 0x6474E552, 2
_MAX_NAME = 1 << 16
"""Of a symbol: many that end in one place would take for ever to read."""
_FATBIN = struct.Struct("<IHHQ")
_FATBIN_SECTION, _FATBIN_MAGIC, _FATBIN_ALIGNMENT = b".nv_fatbin", 0xBA55ED50, 8


def writable(data: bytes) -> list[tuple[int, int]] | None:
    """(Address, bytes) of its writable memory, relative to where its first byte is mapped; None where it has memory of
    each thread besides. `struct.error` or `ValueError` where it is no shared object.
    """
    segments = _segments(data)
    if any(segment[0] == _THREAD_LOCAL for segment in segments):
        return None
    # The loader takes the right to write away from what it relocated, up to a page's border.
    fixed = max((s[3] + s[6] for s in segments if s[0] == _RELOCATED), default=0) // mmap.PAGESIZE * mmap.PAGESIZE
    spans = [(max(s[3], fixed), s[3] + s[6]) for s in segments if s[0] == _LOAD and s[1] & _WRITABLE]
    return [(begin, end - begin) for begin, end in spans if end > begin]


def _segments(data: bytes) -> list[tuple[int, ...]]:
    header = _HEADER.unpack_from(data)
    program_at, program_count = header[5], header[10]
    return [_read(_SEGMENT, data, program_at + i * _SEGMENT.size) for i in range(program_count)]


def _read(layout: struct.Struct, data: bytes, at: int) -> tuple[Any, ...]:
    if at > len(data):
        raise ValueError("it reaches beyond its file")
    return layout.unpack_from(data, at)


def functions(data: bytes) -> list[int]:
    """File offsets of the functions that a shared object exports. `struct.error` or `ValueError` where it is none."""
    loads = _segments(data)
    offsets: set[int] = set()
    for _, info, index, value in _dynamic_symbols(data):
        if info & 15 == _FUNCTION and index != 0:
            offsets.update(value - s[3] + s[2] for s in loads if s[0] == _LOAD and s[3] <= value < s[3] + s[6])
    return sorted(offsets)


def needed_names(data: bytes) -> list[str]:
    """Names that a shared object leaves to others to define."""
    return sorted({name for name, _, index, _ in _dynamic_symbols(data) if index == 0 and name})


def fatbins(data: bytes) -> list[bytes]:
    """The containers of GPU code in a shared object, each as `cuModuleLoadData` takes it. Raises as `functions`."""
    found: list[bytes] = []
    for section in _sections(data):
        if section[0] != _FATBIN_SECTION:
            continue
        _, at, size = section
        end = min(at + size, len(data))
        while at + _FATBIN.size <= end:
            magic, _, header, body = _FATBIN.unpack_from(data, at)
            if magic != _FATBIN_MAGIC or header < _FATBIN.size or at + header + body > end:
                break
            found.append(data[at : at + header + body])
            at += -(-(header + body) // _FATBIN_ALIGNMENT) * _FATBIN_ALIGNMENT
    return found


def variables(data: bytes) -> list[str]:
    """Names of the variables that kernels of a cubin can write to, and that last. Raises as `functions`."""
    if not data.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("no 64-bit little-endian ELF file")
    lasting = {number for number, (name, *_) in enumerate(_sections(data)) if name.startswith(_GLOBAL)}
    found = _symbols(data, _SYMTAB)
    return sorted({name for name, info, index, _ in found if info & 15 == _OBJECT and index in lasting and name})


def _sections(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset and size of each."""
    if not data.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("no 64-bit little-endian ELF file")
    header = _HEADER.unpack_from(data)
    at, count, names = header[6], header[12], header[13]
    sections = [_read(_SECTION, data, at + i * _SECTION.size) for i in range(count)]
    if not names < count:
        return
    for section in sections:
        begin = sections[names][4] + section[0]
        yield data[begin : data.index(b"\0", begin)], section[4], section[5]


def _dynamic_symbols(data: bytes) -> Iterator[tuple[str, int, int, int]]:
    return _symbols(data, _DYNSYM)


def _symbols(data: bytes, kind: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, info, section index and address of each in tables of this kind."""
    header = _HEADER.unpack_from(data)
    if not data.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("no 64-bit little-endian ELF file")
    section_at, section_count = header[6], header[12]
    sections = [_read(_SECTION, data, section_at + i * _SECTION.size) for i in range(section_count)]
    for section in sections:
        if section[1] != kind:
            continue
        names_at = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], _SYMBOL.size):
            name_at, info, _, index, value, _ = _read(_SYMBOL, data, at)
            begin = names_at + name_at
            yield (
                data[begin : data.index(b"\0", begin, begin + _MAX_NAME)].decode("ascii", "replace"),
                info,
                index,
                value,
            )
