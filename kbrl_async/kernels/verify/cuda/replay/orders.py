"""What the bench and a player say to each other, as msgspec bytes over a sequenced-packet socket. A player is trusted;
its answers are decoded by their schema all the same.
"""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.verify import wire

MAX_MESSAGE = 1 << 20


class MapArena(msgspec.Struct, frozen=True, tag="map"):
    """The arena from now on; its descriptor travels along. Everything that was loaded stays good."""

    size: int


class LoadProgram(msgspec.Struct, frozen=True, tag="load"):
    """A recording and its images; the descriptor of a file that holds both travels along."""

    images: list[tuple[str, list[int]]]
    """Digest and length of each part, in the order of the file."""
    plan: int
    """Length of the recording, which comes behind the images."""


class WarmUp(msgspec.Struct, frozen=True, tag="warm_up"):
    slot: int


class RunForward(msgspec.Struct, frozen=True, tag="run"):
    slot: int
    is_muted: bool = False
    left_out: tuple[int, ...] = ()
    """Numbers of nodes that are not run."""


class Time(msgspec.Struct, frozen=True, tag="time"):
    """Forwards over these slots in this order behind one flush, `times` over; 0: their graph is made, and not run."""

    slots: tuple[int, ...]
    times: int = 1
    is_muted: bool = False
    left_out: tuple[int, ...] = ()
    """As in `RunForward`."""


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """What was loaded goes, and a known kernel runs."""


Order = MapArena | LoadProgram | WarmUp | RunForward | Time | Unload


class RunDone(msgspec.Struct, frozen=True, tag="done"):
    is_short: bool = False
    """Whether an operator was refused memory so far, and may have gone a way that rounds otherwise."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    has_operators: bool = False
    refused: str = ""
    """Why it can't be done again here."""


class Times(msgspec.Struct, frozen=True, tag="times"):
    elapsed_ns: wire.Claimed
    is_short: bool = False
    """As in `RunDone`."""


class Sung(msgspec.Struct, frozen=True, tag="sung"):
    """Of the known kernel."""

    is_right: bool
    elapsed_ns: wire.Claimed
    held: int
    """Bytes that the process keeps for itself."""


class CannotReplay(msgspec.Struct, frozen=True, tag="refused"):
    """This can't be done again here, for a reason that is nobody's fault."""

    text: str


Answer = wire.Confined | RunDone | Loaded | Times | Sung | CannotReplay | wire.Failed
encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
