"""What the trusted bench and a runner child say to each other, as msgspec bytes over a sequenced-packet socket.

Tensors never travel: a `TensorMeta` says where one lies, in a shared arena or in the child's memory.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal

import msgspec

from kbrl_async.kernels.sandbox import Level

MAX_REPLY = 1 << 20
GO = struct.Struct("<BBQ")
"""op, slot, nonce: the timed message, kept to ten bytes."""

OP_RUN, OP_EMPTY, OP_DOUBLE = 1, 2, 3
OP_POISON_ON, OP_POISON_OFF = 4, 5
"""In place of a slot, on a GPU: 1 where memory is scarce, so that no more is poisoned than the next call's outputs."""
OP_TRACE: int = 16
"""One recorded run."""
OP_MUTED: int = 17
"""One with the candidate's own kernels switched off."""
OP_SHADOWED: int = 21
"""One in which operators are done once more on what would be there if own code had written nothing."""
OP_HELD: int = 18
"""The outputs of the run before the last again."""
OP_RECORD = 19
"""One run, written down as data: see `Taped`."""
OP_BURST = 20
"""One run over each slot; the answer is a list of what they returned."""
OP_CAPTURE, OP_REPLAY, OP_EVENT, OP_FREE, OP_EVENTS = 32, 33, 34, 35, 36
"""On a GPU: make a graph of one forward over each of `slot` slots; time them `slot` times over; time one ordinary
forward; give back memory that is needed no more; time `slot` ordinary forwards, one after the other."""
OP_LOWERED: int = 64
"""And above: one run of a reference with matrix products of narrower numbers, see `lowering.number`."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Claimed = Annotated[float, msgspec.Meta(ge=0)]
"""Nanoseconds that a child says something took."""
Tree = Any
"""`["T", i]` tensor i · `["V", plain]` · `["Y"|"F", name]` a dtype or memory format of torch ·
`["L"|"U", [tree…]]` list or tuple · `["D", {key: tree}]`."""


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[Count, ...]
    strides: tuple[Count, ...]
    place: Count
    """Offset in the arena or file, or an address in the child."""
    kind: str = "Tensor"
    """Name of the Python type; anything but `Tensor` is a subclass."""


class Setup(msgspec.Struct, frozen=True):
    """The payload that a runner starts with."""

    source: str
    entry: str
    """`"Model"` or `"ModelNew"`."""
    seed: int
    artifacts: dict[str, str] = {}
    init: Tree = None
    """Constructor arguments; None where the source's own `get_init_inputs` is asked (reference)."""
    init_tensors: list[TensorMeta] = []
    weights: list[tuple[str, TensorMeta]] = []
    device: str = "cpu"
    weights_bytes: int = 0
    """On a GPU: size of the arena whose descriptor travels along."""
    backend: str = ""
    """Of a candidate: whose artifacts they are."""
    program: bytes = b""
    """For a replay: what is done instead of `source`, a `cpu.program.Program`."""
    blocks: list[tuple[Count, Count]] = []
    """For a replay: which of its two files each block of the program lies in, and where: 0 can't be written to."""


class Confined(msgspec.Struct, frozen=True, tag="confined"):
    """First message, before any code of the source has run."""

    level: Level
    missing: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    init: Tree = None
    init_tensors: list[TensorMeta] = []
    weights: list[tuple[str, TensorMeta]] = []
    outline: tuple[Count, Count] = (0, 0)
    """Of a reference on a GPU: bytes of its inputs and outputs; 0 where nobody knows without making them."""


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    tree: Tree
    tensors: list[TensorMeta]
    beside: int = 0
    """Bytes that making them took at most, beside any arena: none where they came about where they belong."""


class Trace(msgspec.Struct, frozen=True):
    """What one run consisted of, as the child tells it: (count, nanoseconds of CPU time) by name."""

    launches: dict[str, tuple[Count, Count]] = {}
    """Own kernels."""
    ops: dict[str, tuple[Count, Count]] = {}
    """ATen operators outside of own kernels."""
    inside: dict[str, tuple[Count, Count]] = {}
    """ATen operators called by own kernels."""
    answered: str = ""
    """With own kernels off: the ATen operator whose result already was the answer."""
    tampered: str = ""
    """A function of the runner, of torch or of a clock that the candidate replaced."""
    unseen: str = ""
    """An ATen operator in a CUDA graph of the candidate's own, whose result was compared with nothing."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    nonce: int
    tree: Tree
    tensors: list[TensorMeta]
    trace: Trace | None = None
    inside: Count = 0
    """On a GPU: bytes that this call took at most, its outputs among them."""
    is_short: bool = False
    """On a GPU: whether the library was refused memory meanwhile: then it may go a way that rounds otherwise."""


class Captured(msgspec.Struct, frozen=True, tag="captured"):
    nonce: int
    kernels: dict[str, Count] = {}
    """Kernels of one forward by name, as the child tells it."""
    refused: str = ""
    """Why forward can't be timed as a graph; empty where it can."""
    is_short: bool = False
    """Whether the library was refused memory meanwhile: then it goes another way, which may be slower."""


class Taped(msgspec.Struct, frozen=True, tag="taped"):
    """On a CPU: what one run consisted of."""

    nonce: int
    program: bytes = b""
    """A `cpu.program.Program`; empty where it was refused."""
    refused: str = ""
    """Why it can't be done again by others."""


class Timed(msgspec.Struct, frozen=True, tag="timed"):
    nonce: int
    elapsed_ns: Claimed
    """Between two events, summed over repetitions, as the child tells it; `Session` measures the wall itself."""
    empty_ns: Claimed = 0.0
    """Between two events with nothing in between."""
    stream_ns: Claimed = 0.0
    """Of an ordinary forward, up to the end of its own stream: `elapsed_ns` waits for every stream."""


FailureKind = Literal["runtime_error", "out_of_memory", "illegal_access"]
"""All that a child may say of its own end; each is a `Fault`."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    kind: FailureKind
    text: str


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Run the problem's `get_inputs` after this seed."""

    seed: int
    inputs: str = ""
    """Text that makes another `get_inputs` of the problem's functions: the inputs of one workload of several."""
    more: tuple[int, ...] = ()
    """On a GPU: further seeds; the answer then is a list of draws."""
    is_lent: bool = False
    """On a GPU: into slot 0 of the arena that is there, by the `Export` that follows."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Where the inputs of each slot lie, in a new arena whose descriptor travels along; on a GPU without one in the
    arena that is there.
    """

    size: int
    tree: Tree
    slots: list[list[TensorMeta]]
    copy_to: int = -1
    """≥ 0: copy outputs to this offset inside the call, because the host lets nobody read a child's memory."""
    outs: list[list[TensorMeta]] = []
    """On a GPU: where the outputs of a timed forward over each slot go."""


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Copy what was described last (weights, drawn inputs) into the arena whose descriptor travels along; without one
    into the arena that is there, from its beginning on.
    """

    size: int
    keeps_freed: bool = False
    """Memory that torch has freed stays with the process, which will ask for as much again."""


class Move(msgspec.Struct, frozen=True, tag="move"):
    """On a GPU: the arena will lie in other memory, whose descriptor travels along. Give the old memory back, and map
    that where it was; without a descriptor nothing, until the next such order.
    """


class Mute(msgspec.Struct, frozen=True, tag="mute"):
    """Replay the graph of slot 0 with these kernels left out, and time it."""

    nonce: int
    kernels: list[str]


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """To a reference on a GPU: drop all that it holds. It answers as at its start, and takes another `Setup`."""


class Map(msgspec.Struct, frozen=True, tag="map"):
    """To a recorder: its arena from now on, whose descriptor travels along."""

    size: int


class RecordForward(msgspec.Struct, frozen=True, tag="record"):
    """To a recorder: write this candidate's forward down. With it travel the descriptors of the file that the recording
    goes to, of the weights where there are any, and of the artifacts in their order.
    """

    setup: Setup
    tree: Tree
    slots: list[list[TensorMeta]]
    """Where the inputs of each slot lie in the arena."""
    start: int
    """Where its own memory begins: what lies before is the bench's."""
    weights: int = 0
    """Where the weights lie in the arena, behind all that is its own; 0: they come by descriptor."""
    is_brief: bool = False
    """A forward that takes long is called once, and its graph is not launched to see whether it does the same: that
    is asked of it again where its replay turns out wrong."""


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    size: Count
    """Of the recording in its file."""
    left: Count = 0
    """Bytes that earlier candidates hold for ever, as the child tells it."""
    is_over: bool = False
    """It can serve nobody any more."""


Reply = Confined | Ready | Drawn | Done | Captured | Taped | Timed | Failed | Recorded
Order = Draw | Attach | Export | Move | Mute | Rest
RecorderOrder = Map | RecordForward
encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_recorder_order = msgspec.msgpack.Decoder(RecorderOrder).decode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
