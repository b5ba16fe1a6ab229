"""Whatever bytes arrive: every decoder answers or refuses, and the ledger survives every message that decodes."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kbrl_async.errors import UserError
from kbrl_async.keyring import Keyring, client_keys
from protocols import events as ev
from protocols import framing
from protocols import messages as msg
from protocols.auth import Guard, Peer, Role, Seal
from protocols.checking import CheckOptions
from protocols.leases import parse_lease_id, seal_lease, unseal_lease
from protocols.ledger import Ledger, LedgerOptions
from protocols.opinions import agreeing
from protocols.transfer import Download, Upload, is_address
from services.broker.artifact_exchange import ArtifactExchange

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TASKS = ("t0", "t1")
LEASES = st.sampled_from(["", ":", "1.1:bench:t0", "1.1.ab:bench:t0", "1.1:generate:t1", "9.9:x:y", "::::"])
WORDS = st.sampled_from(["", "bench", "compile", "generate", "score", "train", "trained", *TASKS, "g", "w.1", "\x00"])
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 3)
FLOATS = st.floats(width=64) | st.integers(-1, 5).map(float)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Anything that msgspec would accept for a field of this type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    name = str(kind)
    simple: dict[str, st.SearchStrategy[Any]] = {
        str(str): WORDS | LEASES, str(int): NUMBERS, str(float): FLOATS, str(bool): st.booleans(),
        str(list[str]): st.lists(WORDS | LEASES, max_size=4), str(dict[str, str]): st.dictionaries(WORDS, WORDS),
        str(dict[str, int]): st.dictionaries(WORDS, NUMBERS), str(dict[str, float]): st.dictionaries(WORDS, FLOATS),
    }  # fmt: skip
    if name in simple:
        return simple[name]
    (inner,) = kind.__args__
    return st.lists(values(inner), max_size=2)


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{field.name: values(field.type) for field in fields})


MESSAGES = st.one_of([structs(kind) for kind in framing.KINDS.values()])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6))
@example([b"\x01\x01", b"\x91" * 100_000])
@example([b"\x01\x05", b"\xdd\xff\xff\xff\xff"])
@example([b"\x01\x05", b"\x95\xa1\xff\xa0\xa0\x00\xa0"])
def test_random_frames_are_a_message_or_refused(frames: list[bytes]) -> None:
    with contextlib.suppress(framing.FrameError):
        framing.decode(frames)


@settings(max_examples=100, deadline=None)
@given(MESSAGES, st.data())
def test_a_message_with_changed_bytes_is_a_message_or_refused(message: msg.Message, data: st.DataObject) -> None:
    prefix, header = framing.encode(message)
    spot = data.draw(st.integers(0, len(header) - 1))
    with contextlib.suppress(framing.FrameError):
        framing.decode([prefix, header[:spot] + data.draw(st.binary(min_size=1, max_size=3)) + header[spot + 1 :]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(MESSAGES, st.sampled_from(["", "bench/w", "learner/w"]), st.booleans()), max_size=12))
def test_the_ledger_survives_every_message_of_everybody(script: list[tuple[msg.Message, str, bool]]) -> None:
    ledger = Ledger(LedgerOptions(checks=CheckOptions(0.5)), seal=Seal(b"x"), rng=random.Random(0))
    for task_id in TASKS:
        ledger.handle(ev.FromProducer(b"p", msg.Submit(task_id, "bench", "g")), 0.0)
    for number, (message, owner, is_worker) in enumerate(script):
        kind = ev.FromWorker(owner.encode() or b"r", message, owner) if is_worker else ev.FromProducer(b"p", message)
        for action in ledger.handle(kind, float(number)):
            if isinstance(action, ev.Compare):
                ledger.handle(ev.Compared(action.task_id, []), float(number))
        ledger.handle(ev.Tick(), float(number))
        msgspec.json.encode(ledger.stats(float(number)))
    counters = ledger.counters
    assert counters["submitted"] == counters["finished"] + len(ledger.tasks.live)


@settings(max_examples=80, deadline=None)
@given(MESSAGES, st.sampled_from(list(Role)), st.integers(0, 5000))
def test_what_the_guard_admits_is_within_the_role(message: msg.Message, role: Role, frames: int) -> None:
    guard = Guard({"key": Peer(role, "w", "key")})
    if guard.admit("key", b"r", message, frames, 0.0) == "":
        if isinstance(message, msg.Hello):
            assert message.policy_version == -1 or role is Role.LEARNER
            assert message.worker_id == "w" or message.worker_id.startswith("w.")
        if isinstance(message, msg.Result):
            assert frames <= 1
        if isinstance(message, msg.Submit | msg.Retire):
            assert role is Role.AGGREGATOR


@given(st.text(max_size=40))
@example("no.colon.here")
def test_a_lease_id_is_read_or_none(text: str) -> None:
    parse_lease_id(text)
    plain, tag = unseal_lease(text)
    if tag:
        assert seal_lease(plain, tag) == text


@given(st.lists(st.lists(st.binary(max_size=60), max_size=2), max_size=3))
def test_random_opinions_agree_with_nothing(opinions: list[list[bytes]]) -> None:
    assert agreeing(opinions, 0.25) == []


@FEW
@given(structs(msg.Want), structs(msg.Offer), st.binary(max_size=50))
def test_the_depot_survives_every_request(tmp_path: Path, want: msg.Want, offer: msg.Offer, piece: bytes) -> None:
    depot = ArtifactExchange(tmp_path / "depot", 1 << 20)
    depot.want(want)
    depot.offer("x", offer, [piece])
    assert all(path.is_relative_to(tmp_path / "depot") for path in tmp_path.rglob("*.so"))


@given(structs(msg.Chunk), structs(msg.Kept), st.binary(max_size=20))
def test_transfers_survive_every_answer(chunk: msg.Chunk, kept: msg.Kept, piece: bytes) -> None:
    download, upload = Download("a" * 64), Upload(b"content")
    download.tick(0.0)
    upload.tick(0.0)
    download.handle(msgspec.structs.replace(chunk, address="a" * 64), piece)
    upload.handle(msgspec.structs.replace(kept, address=upload.address), 0.0)
    download.tick(9.0)
    upload.tick(9.0)
    assert download.content is None
    assert is_address(upload.address)


@FEW
@given(st.binary(max_size=200))
def test_a_key_file_of_any_content_is_a_key_or_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("peer.key", "broker.pub"):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    allowed = tmp_path / "allowed" / "bench" / "x.pub"
    allowed.parent.mkdir(parents=True, exist_ok=True)
    allowed.write_bytes(content)
    Keyring(tmp_path).peers()
    with pytest.raises(UserError):
        client_keys(tmp_path)
