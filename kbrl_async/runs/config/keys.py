"""The keys of `Config`, taken from the structs themselves: their types in words, and their documentation.

One table, `KEYS`, serves loading (which keys exist, how is a value read), its messages (what would have been right)
and the printed reference.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect as types

from kbrl_async.doors import Door
from kbrl_async.runs.config.schema import Config


class Key(msgspec.Struct, frozen=True):
    """One key: where it is, what it takes, what it does."""

    name: str
    """`name` or `section.name`."""
    type: Any
    """The annotation, with its range."""
    default: Any
    owner: type[msgspec.Struct]
    """The struct that it is a field of."""

    @property
    def doc(self) -> str:
        """What stands under it in the source. Read when it is asked for: every process imports this module."""
        return attribute_docs(self.owner).get(self.name.rpartition(".")[2], "")

    @property
    def expects(self) -> str:
        """The type in words, such as `an integer ≥ 1 or null`."""
        return describe(types.type_info(self.type))

    @property
    def choices(self) -> list[str]:
        """The words that a literal type or a door allows."""
        parts = _parts(types.type_info(self.type))
        words = [str(value) for part in parts if isinstance(part, types.LiteralType) for value in part.values]
        return words if self.door is None else [*words, *self.door.names()]

    @property
    def door(self) -> Door | None:
        """Where the name that it takes, or the names, are looked up."""
        for part in _parts(types.type_info(self.type)):
            if (door := _door(part.item_type if isinstance(part, types.ListType) else part)) is not None:
                return door
        return None

    def takes(self, *kinds: type[types.Type]) -> bool:
        """Whether the type, or one part of a union, is of one of these kinds."""
        return any(isinstance(part, kinds) for part in _parts(types.type_info(self.type)))


def _door(info: types.Type) -> Door | None:
    door = (info.extra or {}).get("door") if isinstance(info, types.Metadata) else None
    return door if isinstance(door, Door) else None


def _parts(info: types.Type) -> tuple[types.Type, ...]:
    return info.types if isinstance(info, types.UnionType) else (info,)


def describe(info: types.Type) -> str:
    """A type in words."""
    match info:
        case types.UnionType(types=parts):
            # null reads best last
            ordered = sorted(parts, key=lambda part: isinstance(part, types.NoneType))
            return " or ".join(describe(part) for part in ordered)
        case types.Metadata() if (door := _door(info)) is not None:
            return f"one of {', '.join(door.ours)}, or package.module:object"
        case types.IntType():
            return "an integer" + _range(info)
        case types.FloatType():
            return "a number" + _range(info)
        case types.LiteralType(values=values):
            return ("one of " if len(values) > 1 else "") + ", ".join(str(value) for value in values)
        case types.ListType(item_type=item):
            return f"a list, each {describe(item)}"
        case types.BoolType():
            return "true or false"
        case types.NoneType():
            return "null"
        case _:
            return "text"


def _range(info: types.IntType | types.FloatType) -> str:
    signs = (("≥", info.ge), (">", info.gt), ("≤", info.le), ("<", info.lt))
    words = [f" {sign} {bound:g}" for sign, bound in signs if bound is not None]
    return " and".join(words)


@functools.cache
def attribute_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The string that stands under each field in the source of `struct`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(below):
            docs[field.target.id] = " ".join(ast.literal_eval(below.value).split())  # type: ignore[attr-defined] # _is_text checked it
    return docs


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _keys_of(struct: type[msgspec.Struct], default: msgspec.Struct, prefix: str = "") -> dict[str, Key]:
    found: dict[str, Key] = {}
    for field in msgspec.structs.fields(struct):
        value = getattr(default, field.name)
        if is_section(field.type):
            found |= _keys_of(field.type, value, f"{field.name}.")
        else:
            name = prefix + field.name
            found[name] = Key(name=name, type=field.type, default=value, owner=struct)
    return found


SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    field.name: field.type for field in msgspec.structs.fields(Config) if is_section(field.type)
}
KEYS: Mapping[str, Key] = _keys_of(Config, Config())


def flat(config: Config) -> dict[str, Any]:
    """The values of `config` by key."""
    values: dict[str, Any] = {}
    for name in KEYS:
        section, _, leaf = name.rpartition(".")
        values[name] = getattr(getattr(config, section) if section else config, leaf)
    return values
