"""Which own kernels of a recorded forward may have to do with an input: what reads it, and all that comes behind."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kbrl_async.kernels.verify.cuda.arena import BASE
from kbrl_async.kernels.verify.cuda.replay.stretches import Span, touches
from kbrl_async.kernels.verify.recording import Forward, Kernel, Memcpy, Node, Operator
from kbrl_async.kernels.verify.validation import span


def own_kernels_behind(forward: Forward, inputs: Sequence[Span]) -> tuple[int, ...] | None:
    """Numbers of the own kernels that come no sooner than what first reads memory of these inputs; None where nothing
    is seen to read it, as a table of pointers hides who does.
    """
    first = next((number for number, node in enumerate(forward.nodes) if _reads(node, inputs)), None)
    if first is None:
        return None
    return tuple(number for number, node in enumerate(forward.nodes) if number >= first and isinstance(node, Kernel))


def _reads(node: Node, spans: Sequence[Span]) -> bool:
    """Whether an argument lies there: of a kernel, any pointer in the bytes of its parameters."""
    if isinstance(node, Kernel):
        words = [word for one in node.arguments for (word,) in struct.iter_unpack("<Q", one[: len(one) // 8 * 8])]
        return any(begin <= word - BASE < end for word in words for begin, end in spans)
    if isinstance(node, Operator):
        return any(touches(span(meta), spans) for meta in node.tensors)
    return isinstance(node, Memcpy) and touches((node.source, node.source + node.size), spans)
