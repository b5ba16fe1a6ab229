"""Two neighbouring revisions of the wire understand each other, in both directions: see docs/protocol.md.

The golden files are what the code of that time wrote; nothing of today's code has made them.
"""

from __future__ import annotations

import json
import typing
from functools import cache
from typing import Any

import msgspec
import pytest

from protocols import events, framing, messages, records
from tests.protocol.freezing import GOLDEN, filled, frozen, structs

REVISIONS = sorted(int(path.stem.partition("-")[2]) for path in GOLDEN.glob("revision-*.json"))
TODAY = {**structs(messages), **structs(records)}


@cache
def revision(number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"revision-{number}.json").read_text())
    return found


def cases(part: str) -> list[tuple[int, str]]:
    return [(number, name) for number in REVISIONS for name in revision(number)[part]]


def older(kind: Any, fields: dict[str, str]) -> Any:
    """A type of today as the revision knew it: structs, however deep inside, with their first fields only."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _older_struct(kind, fields)
    inner = typing.get_args(kind)
    if not inner or typing.get_origin(kind) is typing.Literal:
        return kind
    return typing.cast("Any", typing.Union if isinstance(kind, type(int | str)) else typing.get_origin(kind))[
        tuple(older(part, fields) if part is not ... else part for part in inner)
    ]


def _older_struct(kind: type[msgspec.Struct], fields: dict[str, str]) -> type[msgspec.Struct]:
    config, hints = kind.__struct_config__, typing.get_type_hints(kind, include_extras=True)
    kept: list[Any] = []
    for field in msgspec.structs.fields(kind)[: len(fields[kind.__name__].split())]:
        default = () if field.required else (msgspec.field(default=None),)
        kept.append((field.name, older(hints[field.name], fields), *default))
    return msgspec.defstruct(kind.__name__, kept, array_like=config.array_like, tag=config.tag, frozen=True)


def plain_of(value: Any) -> Any:
    """What is on the wire of it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def prefix(plain: Any, known: Any) -> Any:
    """Of what a newer struct holds, that which an older one has a place for."""
    if isinstance(known, dict) and isinstance(plain, dict):
        return {key: prefix(plain[key], value) for key, value in known.items() if key in plain}
    if isinstance(known, list) and isinstance(plain, list):
        return [prefix(*pair) for pair in zip(plain, known, strict=False)]
    return plain


def test_there_are_two_revisions_behind_todays_wire() -> None:
    assert len(REVISIONS) >= 2
    assert list(REVISIONS) == list(range(1, len(REVISIONS) + 1))


@pytest.mark.parametrize(("number", "name"), cases("messages"))
def test_a_message_of_then_is_understood_today(number: int, name: str) -> None:
    frames = [bytes.fromhex(frame) for frame in revision(number)["messages"][name]]
    message, _ = framing.decode(frames)
    assert type(message).__name__ == name
    sent = msgspec.msgpack.decode(frames[1])
    assert prefix(plain_of(message), sent) == sent


@pytest.mark.parametrize(("number", "name"), cases("records"))
def test_a_record_of_then_is_understood_today(number: int, name: str) -> None:
    data = bytes.fromhex(revision(number)["records"][name])
    record = msgspec.msgpack.decode(data, type=TODAY[name])
    sent = msgspec.msgpack.decode(data)
    assert prefix(plain_of(record), sent) == sent


@pytest.mark.parametrize(("number", "name"), cases("messages"))
def test_a_message_of_today_is_understood_by_the_code_of_then(number: int, name: str) -> None:
    golden = json.loads((GOLDEN / "messages.json").read_text())
    data = bytes.fromhex(golden[name][1])
    known = msgspec.msgpack.decode(data, type=older(TODAY[name], revision(number)["fields"]))
    sent = msgspec.msgpack.decode(data)
    plain = plain_of(known)
    assert plain == prefix(sent, plain)
    assert len(plain) == min(len(sent), len(revision(number)["fields"][name].split()))


@pytest.mark.parametrize(("number", "name"), cases("records"))
def test_a_record_of_today_is_understood_by_the_code_of_then(number: int, name: str) -> None:
    data = msgspec.msgpack.encode(filled(TODAY[name], name))
    known = msgspec.msgpack.decode(data, type=older(TODAY[name], revision(number)["fields"]))
    plain = plain_of(known)
    assert plain == prefix(msgspec.msgpack.decode(data), plain)


def test_a_task_in_a_journal_of_before_is_understood_today_and_the_other_way_round() -> None:
    data = msgspec.msgpack.encode({"seq": 1, "task_id": "g000001.r1", "stage": "bench", "max_lag": 2})
    row = msgspec.msgpack.decode(data, type=events.TaskRow)
    assert row.max_staleness == 2
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row))["max_lag"] == 2


@pytest.mark.parametrize("number", REVISIONS)
def test_fields_and_kinds_only_ever_grow(number: int) -> None:
    then, now = revision(number), frozen()
    moved = [
        name for name, fields in then["fields"].items() if not f"{now['fields'].get(name)} ".startswith(f"{fields} ")
    ]
    assert moved == [], "fields are appended, and never renamed, moved or removed"
    kinds = {name: frames[0] for name, frames in then["messages"].items()}
    assert {name: now["messages"][name][0] for name in kinds} == kinds


def test_a_kind_that_the_other_side_does_not_know_is_refused_by_its_number_and_nothing_else_happens() -> None:
    unknown = bytes((framing.VERSION, max(framing.KINDS) + 1))
    with pytest.raises(framing.FrameError, match="unknown message kind"):
        framing.decode([unknown, b"\x90"])
