"""Frames on the wire: `[version, kind][header][payload …]`, the route frame in front being the ROUTER's own.

The first frame is two bytes, so that a peer of another version or a message of an unknown kind is refused before its
body is looked at. The header is one msgspec struct of `messages`; payload frames are opaque bytes::

    b"\\x01\\x06"  b"\\x97…"  b"…"  b"…"
     │   └ kind     header    payload frames, passed on untouched
     └ version

Invariants
* Whatever arrives, `decode` returns a message or raises `FrameError`; nothing else escapes.
* Encoders and decoders are built once. A new kind gets a new number; numbers are never used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from protocols import messages

VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_FRAMES = 4096

KINDS: dict[int, type[messages.Message]] = {
    1: messages.Hello,
    2: messages.Welcome,
    3: messages.Beat,
    4: messages.Task,
    5: messages.Result,
    6: messages.Ack,
    7: messages.Revoke,
    8: messages.Nack,
    9: messages.Drain,
    10: messages.Bye,
    11: messages.Submit,
    12: messages.SubmitAck,
    13: messages.Busy,
    14: messages.Retire,
    15: messages.QuietRequest,
    16: messages.QuietGrant,
    17: messages.QuietDone,
    18: messages.Pause,
    19: messages.Paused,
    20: messages.Resume,
    21: messages.StatusRequest,
    22: messages.StatusReport,
    23: messages.Want,
    24: messages.Chunk,
    25: messages.Offer,
    26: messages.Kept,
}

_encode = msgspec.msgpack.Encoder().encode
_prefixes = {struct: bytes((VERSION, kind)) for kind, struct in KINDS.items()}
_decoders = {bytes((VERSION, kind)): msgspec.msgpack.Decoder(struct).decode for kind, struct in KINDS.items()}


class FrameError(ValueError):
    """The frames are not a message of this protocol; `str(error)` is the cause in one line."""


def encode(message: messages.Message, payload: Iterable[bytes] = ()) -> list[bytes]:
    """Frames of a message, ready for `send_multipart`."""
    return [_prefixes[type(message)], _encode(message), *payload]


def decode(frames: Sequence[bytes]) -> tuple[messages.Message, list[bytes]]:
    """The message and its payload frames; raises `FrameError` for anything that is not one."""
    if len(frames) < 2:
        raise FrameError(f"truncated: {len(frames)} frames, at least 2 needed")
    if len(frames) - 2 > MAX_PAYLOAD_FRAMES:
        raise FrameError(f"oversized: {len(frames) - 2} payload frames, at most {MAX_PAYLOAD_FRAMES} allowed")
    if len(frames[1]) > MAX_HEADER_BYTES:
        raise FrameError(f"oversized: header of {len(frames[1])} bytes, at most {MAX_HEADER_BYTES} allowed")
    decoder = _decoders.get(frames[0])
    if decoder is None:
        raise FrameError(_why_unknown(frames[0]))
    try:
        return decoder(frames[1]), list(frames[2:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"bad {KINDS[frames[0][1]].__name__} header: {error}") from None


def _why_unknown(prefix: bytes) -> str:
    if len(prefix) != 2:
        return f"the version and kind frame has {len(prefix)} bytes, not 2"
    if prefix[0] != VERSION:
        return f"protocol version {prefix[0]}, this side speaks {VERSION}"
    return f"unknown message kind {prefix[1]}"
