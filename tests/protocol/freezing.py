"""The wire as it is now, as a file that later code is tested against: `python -m tests.protocol.freezing 3`.

A revision is frozen when something was appended to the wire and the code that has it is about to be used by others.
Frozen files are never changed; see docs/protocol.md.
"""

from __future__ import annotations

import enum
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from protocols import messages, records

GOLDEN = Path(__file__).parent / "golden"


def frozen() -> dict[str, Any]:
    """Golden bytes of every message and record, and the fields of each struct in their order."""
    found = {**structs(messages), **structs(records)}
    return {
        "messages": json.loads((GOLDEN / "messages.json").read_text()),
        "records": {name: msgspec.msgpack.encode(filled(kind, name)).hex() for name, kind in structs(records).items()},
        "fields": {name: " ".join(kind.__struct_encode_fields__) for name, kind in found.items()},
    }


def structs(module: types.ModuleType) -> dict[str, type[msgspec.Struct]]:
    """The structs that a module defines."""
    mine = (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__)
    return {kind.__name__: kind for kind in mine if issubclass(kind, msgspec.Struct)}


def filled(kind: Any, name: str) -> Any:
    """A value of a type with nothing left at its default; text is the name of its field."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return filled(next(part for part in inner if part is not type(None)), name)
    if origin is typing.Annotated:
        return filled(inner[0], name)
    if origin is tuple:
        return tuple(filled(part, name) for part in inner if part is not ...)
    if origin is list:
        return [filled(inner[0], name)]
    if origin is dict:
        return {filled(inner[0], name): filled(inner[1], name)}
    if issubclass(kind, enum.Enum):
        return list(kind)[-1]
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{field.name: filled(hints[field.name], field.name) for field in msgspec.structs.fields(kind)})
    return {bool: True, int: 7, float: 0.75, str: name, bytes: b"\x01\x02"}[kind]


if __name__ == "__main__":
    path = GOLDEN / f"revision-{int(sys.argv[1])}.json"
    with path.open("x") as file:
        file.write(json.dumps(frozen(), indent=1, sort_keys=True) + "\n")
    print(path)
