"""What a candidate's forward consists of, as data: the plan that a trusted process does again without any of the
candidate's host code (I5).

::

    recorder (confined, the candidate's process) ── Recording, bytes ──▶ bench: `read` ──▶ replayer (trusted)

A recording is written by whoever may lie, and nothing in it is believed: a wrong one gives wrong results. So what has
to hold is only that a replayer stays within the arena and within what was built: places lie in the arena, kernels come
from the candidate's own built artifacts, every other step is an operator that the trusted side knows.

Places are byte offsets in the arena, which has the same address in recorder and replayer. Nodes are in an order in
which they can run one after the other: `after` names earlier ones only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from kbrl_async.kernels.verify import wire

Count = Annotated[int, msgspec.Meta(ge=0)]
Size3 = tuple[Count, Count, Count]


class Kernel(msgspec.Struct, frozen=True, tag="kernel"):
    """One launch of a kernel that was built from the candidate's source."""

    artifact: str
    """sha256 of the machine code that holds it, as 64 hexadecimal digits: of one cubin in a bundle, or of a whole
    shared object. The key of an artifact would not do: a bundle holds several kernels of one name."""
    name: str
    """The linker's name."""
    grid: Size3
    block: Size3
    shared: Count
    """Bytes of dynamic shared memory."""
    arguments: list[bytes]
    """The bytes of each parameter, in order; pointers are addresses in the arena."""
    after: list[Count] = []
    """Numbers of the nodes that have to end first."""
    cluster: Size3 = (1, 1, 1)
    is_cooperative: bool = False
    is_serialized: bool = False
    """Programmatic dependent launch."""
    carveout: int = -1
    """Percent of the cache that the function asks for as shared memory, as its attribute says; -1: it asks for none."""


class Memset(msgspec.Struct, frozen=True, tag="memset"):
    place: Count
    value: Count
    element: Count
    """Bytes: 1, 2 or 4."""
    width: Count
    """In elements."""
    height: Count
    pitch: Count
    after: list[Count] = []


class Memcpy(msgspec.Struct, frozen=True, tag="memcpy"):
    """On the device, without pitch."""

    to: Count
    source: Count
    size: Count
    after: list[Count] = []


class Operator(msgspec.Struct, frozen=True, tag="operator"):
    """An operator of torch, which the trusted side does itself on views of the arena."""

    name: str
    """`aten::mm.out`, `aten::add.Tensor`: looked up in the list of those that are allowed."""
    arguments: Any
    """A `wire.Tree` over `tensors`: the positional arguments, and a dict of the others: `["L", [positional, named]]`.
    Of the named ones, `device`, `layout` and `pin_memory` are left out."""
    tensors: list[wire.TensorMeta]
    results: list[wire.TensorMeta]
    """Where its results lie; one that returns its own argument has the same place."""
    allocations: list[tuple[Count, Count]] = []
    """(place, bytes) of all memory that it asked for, in that order, its results among it. The same operator asks for
    the same again and is given the same places, so that nothing has to be copied and it takes as long; where it asks
    for other sizes it gets other memory, and its results are copied to their places."""
    after: list[Count] = []


Node = Kernel | Memset | Memcpy | Operator


class Forward(msgspec.Struct, frozen=True):
    """One forward over the inputs of one slot."""

    nodes: list[Node]
    tree: wire.Tree
    outputs: list[wire.TensorMeta]


NO_ROOM = "its forward takes more memory than it is recorded in"
"""How a `Recording.refused` begins where more memory may help."""


class Recording(msgspec.Struct, frozen=True):
    forwards: list[Forward] = []
    """By slot."""
    image: list[tuple[Count, Count]] = []
    """Begin and end of each stretch that lasts from call to call (weights and what was made from them), in order of
    place: they are restored before each replay, and everything else but the inputs is poisoned. The recorder's own
    arena holds their content until its next order."""
    used: Count = 0
    """End of all that forward uses."""
    refused: str = ""
    """Why this forward can't be recorded, in words; then the rest is empty."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Recording).decode
"""Of what was validated: `validation.read` is for what a recorder sends."""


def counted(forward: Forward) -> dict[str, tuple[int, bool]]:
    """How often each kernel, operator or copy is in a forward, and whether it is the candidate's own."""
    own = Counter(node.name for node in forward.nodes if isinstance(node, Kernel))
    library = Counter(_name(node) for node in forward.nodes if not isinstance(node, Kernel))
    return {name: (count, False) for name, count in library.items()} | {n: (c, True) for n, c in own.items()}


def digest(forwards: Iterable[Forward]) -> str:
    """Of which kernels and operators there are, on what shapes: a tuned kernel may be launched in several ways."""
    steps = dict.fromkeys(repr([_identity(node) for node in forward.nodes]) for forward in forwards)
    return hashlib.sha256("\n".join(steps).encode()).hexdigest()


def ways(forwards: Sequence[Forward]) -> list[list[int]]:
    """Slots by what is done over them: one list where forward does the same over all."""
    found: dict[str, list[int]] = {}
    for slot, forward in enumerate(forwards):
        steps = repr([(_identity(node), _launch(node)) for node in forward.nodes])
        found.setdefault(steps, []).append(slot)
    return list(found.values())


def _launch(node: Node) -> tuple[object, ...]:
    """What of a step is the same for all inputs of one shape."""
    if isinstance(node, Kernel):
        return node.grid, node.block, node.shared, node.cluster, list(map(len, node.arguments)), node.after
    return (node.arguments, node.after) if isinstance(node, Operator) else (node.after,)


def _identity(node: Node) -> tuple[object, ...]:
    if isinstance(node, Kernel):
        return node.artifact, node.name
    tensors = (*node.tensors, *node.results) if isinstance(node, Operator) else ()
    return _name(node), [(meta.dtype, tuple(meta.shape)) for meta in tensors]


def _name(node: Node) -> str:
    if isinstance(node, Operator):
        return node.name
    return "aten::fill_" if isinstance(node, Memset) else "aten::copy_"


def plain(meta: wire.TensorMeta) -> wire.TensorMeta:
    """What type it had in Python is nothing that data has."""
    return wire.TensorMeta(meta.dtype, meta.shape, meta.strides, meta.place)
