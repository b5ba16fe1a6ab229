"""A child's words as what they are: bytes from whoever may lie. Total: they become a `Reply` whose every part is of a
closed set or within bounds, or `Malformed`, and nothing else.

What the schema of `wire` can say, it says there; here is the rest: how trees are built, how far tensors may reach,
how many names there may be, and that times are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from kbrl_async.kernels.verify import values, wire

MAX_KERNELS = 4096
MAX_NAMES = 1 << 16
"""Letters of all kernels' names together: what is asked to be muted has to fit into one message."""
_MAX_DIMENSIONS = 256
_MOST = 1 << 63
_decode = msgspec.msgpack.Decoder(wire.Reply).decode


class Malformed(Exception):  # noqa: N818 - a fact about bytes
    """No runner sends this."""


def read(data: bytes) -> wire.Reply:
    """:raises Malformed: whatever is wrong with `data`."""
    try:
        reply: wire.Reply = _decode(data)
        check_reply(reply)
    except Exception as error:  # the decoder, too, raises what it likes: RecursionError, UnicodeDecodeError
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from error
    return reply


def too_many_names(kernels: Iterable[str]) -> bool:
    """Whether a runner must not send these."""
    names = list(kernels)
    return len(names) > MAX_KERNELS or sum(map(len, names)) > MAX_NAMES


def check_reply(reply: wire.Reply) -> None:
    if isinstance(reply, (wire.Done, wire.Drawn)):
        check_tensors(reply.tree, reply.tensors)
    elif isinstance(reply, wire.Ready):
        check_tensors(["L", []] if reply.init is None else reply.init, reply.init_tensors)
        check_metas([meta for _, meta in reply.weights])
    elif isinstance(reply, wire.Captured):
        demand(not too_many_names(reply.kernels), "too many kernels")
    elif isinstance(reply, wire.Timed):
        times = (reply.elapsed_ns, reply.empty_ns, reply.stream_ns)
        demand(all(map(math.isfinite, times)), "a time is no number")


def check_tensors(tree: wire.Tree, metas: list[wire.TensorMeta]) -> None:
    """A tree over these tensors, each of which it holds once, in order."""
    demand(_next(tree, 0, 0) == len(metas), "another number of tensors than the tree has")
    check_metas(metas)


def _next(tree: Any, first: int, depth: int) -> int:
    """The number of the tensor after those of `tree`, which are numbered from `first` in the order of writing."""
    demand(isinstance(tree, list) and len(tree) == 2 and depth <= values.MAX_DEPTH, "no tree")
    kind, body = tree
    if kind == "T":
        demand(type(body) is int and body == first, "tensors are not numbered in order")
        return first + 1
    if kind == "V":
        demand(type(body) in values.PLAIN, "no plain value")
    elif kind == "Y":
        values.dtype_of(body)
    elif kind == "F":
        values.memory_format_of(body)
    else:
        demand((kind in ("L", "U") and type(body) is list) or (kind == "D" and type(body) is dict), "no tree")
        demand(kind != "D" or all(type(key) is str for key in body), "a key is no text")
        for item in body.values() if kind == "D" else body:
            first = _next(item, first, depth + 1)
    return first


def check_metas(metas: list[wire.TensorMeta]) -> None:
    """Tensors that could be, wherever they lie."""
    for meta in metas:
        dtype = values.dtype_of(meta.dtype)
        demand(len(meta.shape) == len(meta.strides) <= _MAX_DIMENSIONS, "strides do not fit the shape")
        demand(max((*meta.shape, *meta.strides), default=0) < _MOST, "a number is too large")
        demand(extent(meta) * dtype.itemsize < _MOST and math.prod(meta.shape) < _MOST, "a tensor is too large")


def extent(meta: wire.TensorMeta) -> int:
    """Elements from its first to its last one in memory; 0 where it has none."""
    if 0 in meta.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.strides, strict=True))


def demand(holds: bool, what: str) -> None:
    """:raises Malformed: it does not hold."""
    if not holds:
        raise Malformed(what)
