"""A recording's bytes as what they are: from whoever may lie. Total: they become a `Recording` within bounds, or
`Malformed`, and nothing else.

What the schema of `recording` can say, it says there; here is what it means to stay within the arena, within what was
built, and within what a trusted process does for anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from kbrl_async.kernels.verify import allowed, replies, values, wire
from kbrl_async.kernels.verify.recording import Forward, Kernel, Memcpy, Memset, Node, Operator, Recording, decode
from kbrl_async.kernels.verify.replies import Malformed, demand

MAX_BYTES = 64 << 20
MAX_NODES = 16_384
"""Of one forward."""
_MAX_NAME, _MAX_REASON = 4096, 400
_MAX_ARGUMENTS, _MAX_ARGUMENT_BYTES = 1024, 32_764
_MAX_GRID, _MAX_BLOCK, _MAX_CLUSTER, _MAX_SHARED = (1 << 31) - 1, 1024, 16, 256 << 10
_MAX_TENSORS = 1024


class Bounds(msgspec.Struct, frozen=True):
    """What a recording must stay within."""

    size: int
    """Bytes of the arena."""
    images: frozenset[str]
    """Digests of the machine code that was built."""
    slots: int


def read(data: bytes, bounds: Bounds) -> Recording:
    """:raises Malformed: whatever is wrong with `data`."""
    try:
        demand(len(data) <= MAX_BYTES, "too long")
        recording: Recording = decode(data)
        check(recording, bounds)
    except Exception as error:  # the decoder, too, raises what it likes: RecursionError, UnicodeDecodeError
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from error
    return recording


def check(recording: Recording, bounds: Bounds) -> None:
    """:raises Malformed: or `ValueError`: it reaches beyond its bounds."""
    demand(len(recording.refused) <= _MAX_REASON, "a long reason")
    if recording.refused:
        demand(recording == Recording(refused=recording.refused), "refused, and yet recorded")
        return
    demand(len(recording.forwards) == bounds.slots, "another number of forwards than slots")
    demand(recording.used <= bounds.size, "more is used than there is")
    _check_image(recording)
    for forward in recording.forwards:
        _check_forward(forward, recording.used, bounds)


def _check_image(recording: Recording) -> None:
    last = 0
    demand(len(recording.image) <= MAX_NODES, "too many stretches")
    for begin, end in recording.image:
        demand(last <= begin <= end <= recording.used, "stretches of the image are not in order")
        last = end


def _check_forward(forward: Forward, used: int, bounds: Bounds) -> None:
    demand(len(forward.nodes) <= MAX_NODES, "too many nodes")
    for number, node in enumerate(forward.nodes):
        _check_after(node, number)
        _check_node(node, used, bounds)
    replies.check_tensors(forward.tree, forward.outputs)
    _check_places(forward.outputs, used)


def _check_after(node: Node, number: int) -> None:
    after = node.after
    demand(len(after) == len(set(after)) and all(one < number for one in after), "a node waits for a later one")


def _check_node(node: Node, used: int, bounds: Bounds) -> None:
    if isinstance(node, Kernel):
        _check_kernel(node, bounds)
    elif isinstance(node, Memset):
        demand(node.element in (1, 2, 4) and node.value < 1 << (8 * node.element), "no memset")
        demand(node.height >= 1 and (node.height == 1 or node.pitch >= node.width * node.element), "no memset")
        _check_stretch(node.place, (node.height - 1) * node.pitch + node.width * node.element, used)
    elif isinstance(node, Memcpy):
        _check_stretch(node.to, node.size, used)
        _check_stretch(node.source, node.size, used)
    elif isinstance(node, Operator):
        _check_operator(node, used)


def _check_kernel(node: Kernel, bounds: Bounds) -> None:
    demand(node.artifact in bounds.images, "a kernel of nothing that was built")
    demand(0 < len(node.name) <= _MAX_NAME and node.name.isprintable(), "no name of a kernel")
    demand(not node.name.startswith(allowed.NAMESPACE), "a kernel by an operator's name")  # steps are told by name
    demand(min(*node.grid, *node.block, *node.cluster) >= 1 and max(node.grid) <= _MAX_GRID, "no grid")
    demand(math.prod(node.block) <= _MAX_BLOCK and math.prod(node.cluster) <= _MAX_CLUSTER, "no block")
    demand(node.shared <= _MAX_SHARED and -1 <= node.carveout <= 100, "no shared memory")
    total = sum(map(len, node.arguments))
    demand(len(node.arguments) <= _MAX_ARGUMENTS and total <= _MAX_ARGUMENT_BYTES, "too many arguments")


def _check_operator(node: Operator, used: int) -> None:
    demand(len(node.name) <= _MAX_NAME and allowed.is_allowed(node.name), f"no operator that is done: {node.name[:60]}")
    demand(max(len(node.tensors), len(node.results), len(node.allocations)) <= _MAX_TENSORS, "too many tensors")
    replies.check_tensors(node.arguments, node.tensors)
    kind, body = node.arguments
    demand(kind == "L" and len(body) == 2 and body[0][0] == "L" and body[1][0] == "D", "no arguments of an operator")
    _check_places(node.tensors, used)
    replies.check_metas(node.results)
    _check_places(node.results, used)
    for place, size in node.allocations:
        _check_stretch(place, size, used)


def _check_places(metas: Iterable[wire.TensorMeta], used: int) -> None:
    for meta in metas:
        itemsize = values.dtype_of(meta.dtype).itemsize
        demand(meta.place % itemsize == 0, "a tensor lies between two of its elements' places")
        _check_stretch(meta.place, replies.extent(meta) * itemsize, used)


def _check_stretch(place: int, size: int, used: int) -> None:
    demand(place + size <= used, "a place outside of what is used")


def span(meta: wire.TensorMeta) -> tuple[int, int]:
    """First byte of a tensor, and the one behind its last."""
    return meta.place, meta.place + replies.extent(meta) * values.dtype_of(meta.dtype).itemsize


def overlap(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether two of these stretches share a byte.

    >>> overlap([(0, 4), (4, 8)]), overlap([(0, 4), (2, 3)])
    (False, True)
    """
    last = 0
    for begin, end in sorted(one for one in spans if one[0] < one[1]):
        if begin < last:
            return True
        last = end
    return False
