"""What is on the wire: golden bytes of every message, and refusal of everything that is none."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import framing
from protocols import messages as msg

GOLDEN = Path(__file__).parent / "golden" / "messages.json"
LEASE = "3.17:compile:g000012.r3.t0"
MESSAGES: list[msg.Message] = [
    msg.Hello("farm-1", "a1b2", ["compile"], 4, [LEASE], {"cores": "4"}, 7, 2),
    msg.Welcome(3, 1.0, 60.0, 7, [LEASE], '{"backend":"c"}'),
    msg.Beat(4, [LEASE], msg.Load(0.5, 2, 1.25, 48.5, 12, 340, 0.75, 0.5, 512.0, {"reward_mean": 0.25}), 3),
    msg.Task("g000012.r3.t0", LEASE, "compile", 1, 60.0, 7, msg.Status.OK, "g000012"),
    msg.Result("g000012.r3.t0", LEASE, "bench", 7, "g000012", 0.75),
    msg.Ack("g000012.r3.t0", LEASE, False, "duplicate"),
    msg.Revoke(LEASE, "superseded"),
    msg.Nack(LEASE, "no space left"),
    msg.Drain("the broker stops"),
    msg.Bye("done"),
    msg.Submit("g000012.r3.t0", "generate", "g000012", 1, "triton"),
    msg.SubmitAck("", True, "g000012"),
    msg.Busy("g000012.r3.t0", 0.5),
    msg.Retire("g000012"),
    msg.QuietRequest("q1", "host/gpu0", 2.5),
    msg.QuietGrant("q1", "host/gpu0", 2.5, 0.25, ["learner"]),
    msg.QuietDone("q1"),
    msg.Pause("q1", "host/gpu0", 7.5),
    msg.Paused("q1", True),
    msg.Resume("q1"),
    msg.StatusRequest("t1"),
    msg.StatusReport(
        "t1",
        1795246147.5,
        3,
        12.5,
        7,
        True,
        [msg.StageStanding("bench", 5, 2, 1.5, 1, 2, 0.5, 2)],
        [msg.WorkerStanding("farm-1", ["compile"], 4, 3, 2, True, 4.5, msg.Load(0.5, 2, 1.25, 48.5, 12, 340, 0.75))],
        {"submitted": 9},
        msg.Load(0.25),
        [msg.TroubleReport(1795246140.0, "farm-1", "gave a task back: no space left")],
        "default",
        {"rollouts_per_s": 2.5},
    ),
    msg.Want("ab" * 32, 262144, 1000),
    msg.Chunk("ab" * 32, 262144, 300000),
    msg.Offer("ab" * 32, 262144, 300000),
    msg.Kept("ab" * 32, 262144, False, "too large"),
]
REQUIRED = {name: len([f for f in msgspec.structs.fields(kind) if f.required]) for name, kind in vars(msg).items()
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}  # fmt: skip
by_name = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)


def test_every_kind_of_message_has_golden_bytes() -> None:
    assert [type(message) for message in MESSAGES] == list(framing.KINDS.values())


@by_name
def test_the_bytes_of_a_message_never_change(message: msg.Message) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert [frame.hex() for frame in framing.encode(message)] == golden[type(message).__name__]


def test_a_message_of_before_a_field_was_appended_means_what_it_did() -> None:
    before_needs = "94ad673030303031322e72332e7430a867656e6572617465a76730303030313201"
    message, _ = framing.decode([b"\x01\x0b", bytes.fromhex(before_needs)])
    assert message == msg.Submit("g000012.r3.t0", "generate", "g000012", 1, needs="")


def test_a_beat_of_before_cpu_and_gpu_were_added_means_what_it_did() -> None:
    old_load = msgspec.msgpack.encode([4, [LEASE], [0.5, 2, 1.25, 48.5, 12, 340], 3])
    message, _ = framing.decode([b"\x01\x03", old_load])
    assert message == msg.Beat(4, [LEASE], msg.Load(0.5, 2, 1.25, 48.5, 12, 340, cpu=0.0, gpu=-1.0, facts={}), 3)


@by_name
def test_a_message_survives_the_wire_and_its_payload_is_untouched(message: msg.Message) -> None:
    assert framing.decode(framing.encode(message, [b"", b"\x00" * 10])) == (message, [b"", b"\x00" * 10])


@by_name
def test_an_older_peer_that_lacks_appended_fields_is_understood(message: msg.Message) -> None:
    prefix, header = framing.encode(message)
    fields = msgspec.msgpack.decode(header)[: REQUIRED[type(message).__name__]]
    decoded, _ = framing.decode([prefix, msgspec.msgpack.encode(fields)])
    assert msgspec.to_builtins(decoded)[: len(fields)] == fields


@by_name
def test_a_newer_peer_that_has_more_fields_is_understood(message: msg.Message) -> None:
    prefix, header = framing.encode(message)
    longer = [*msgspec.msgpack.decode(header), "of the future"]
    assert framing.decode([prefix, msgspec.msgpack.encode(longer)]) == (message, [])


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ([], "truncated"),
        ([b"\x01\x01"], "truncated"),
        ([b"", b""], "0 bytes, not 2"),
        ([b"\x02\x01", b"\x90"], "protocol version 2"),
        ([b"\x01\x63", b"\x90"], "unknown message kind 99"),
        ([b"\x01\x0a", b"\xff\xff"], "bad Bye header"),
        ([b"\x01\x06", b"\x91\xa1x"], "bad Ack header"),
        ([b"\x01\x0e", b"\x91\xa2\xff\xfe"], "bad Retire header"),
        ([b"\x01\x0a", b"\x90" + b"x" * framing.MAX_HEADER_BYTES], "oversized: header"),
        ([b"\x01\x0a", b"\x90", *[b""] * (framing.MAX_PAYLOAD_FRAMES + 1)], "oversized: 4097 payload frames"),
    ],
)
def test_frames_that_are_no_message_are_refused_with_the_cause_in_one_line(frames: list[bytes], cause: str) -> None:
    with pytest.raises(framing.FrameError, match=cause) as caught:
        framing.decode(frames)
    assert "\n" not in str(caught.value)


@given(
    st.lists(st.binary(max_size=40), max_size=4)
    | st.tuples(st.integers(1, len(framing.KINDS)).map(lambda k: bytes((1, k))), st.binary())
)
def test_garbage_never_raises_anything_but_a_frame_error(frames: list[bytes]) -> None:
    try:
        message, _ = framing.decode(frames)
    except framing.FrameError:
        return
    assert type(message) in framing.KINDS.values()
