"""What the trusted bench and a runner child say to each other, as msgspec bytes over a sequenced-packet socket.

Tensors never travel: a `TensorMeta` says where one lies, in a shared arena or in the child's memory.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MAX_REPLY = 1 << 20
GO = struct.Struct("<BBQ")
"""op, slot, nonce: the timed message, kept to ten bytes."""

OP_RUN, OP_EMPTY, OP_DOUBLE = 1, 2, 3
OP_POISON_ON, OP_POISON_OFF = 4, 5

Tree = Any
"""`["T", i]` tensor i · `["V", plain]` · `["L"|"U", [tree…]]` list or tuple · `["D", {key: tree}]`."""


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: int
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


class Confined(msgspec.Struct, frozen=True, tag="confined"):
    """First message, before any code of the source has run."""

    level: str
    missing: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    init: Tree = None
    init_tensors: list[TensorMeta] = []
    weights: list[tuple[str, TensorMeta]] = []


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    tree: Tree
    tensors: list[TensorMeta]


class Done(msgspec.Struct, frozen=True, tag="done"):
    nonce: int
    tree: Tree
    tensors: list[TensorMeta]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    kind: str
    """`"runtime_error"` or `"out_of_memory"`."""
    text: str


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Run the problem's `get_inputs` after this seed."""

    seed: int


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A new arena (its descriptor travels along): where the inputs of each slot lie."""

    size: int
    tree: Tree
    slots: list[list[TensorMeta]]
    copy_to: int = -1
    """≥ 0: copy outputs to this offset inside the call, because the host lets nobody read a child's memory."""


Reply = Confined | Ready | Drawn | Done | Failed
Order = Draw | Attach
encode = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
