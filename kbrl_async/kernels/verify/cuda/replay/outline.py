"""What the forwards of a recording consist of, whatever they are done to: by names, shapes and launches."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kbrl_async.kernels.verify.recording import Forward, Kernel, Operator


def count_of(forward: Forward) -> dict[str, tuple[int, bool]]:
    """How often each kernel, operator or copy is in a forward, and whether it is the candidate's own."""
    own = Counter(node.name for node in forward.nodes if isinstance(node, Kernel))
    library = Counter(_name(node) for node in forward.nodes if not isinstance(node, Kernel))
    return {name: (count, False) for name, count in library.items()} | {n: (c, True) for n, c in own.items()}


def ways(forwards: Sequence[Forward]) -> list[list[int]]:
    """Slots by what is done over them: one list where forward does the same over all."""
    found: dict[str, list[int]] = {}
    for slot, forward in enumerate(forwards):
        steps = repr([(_identity(node), _launch(node)) for node in forward.nodes])
        found.setdefault(steps, []).append(slot)
    return list(found.values())


def _launch(node: Any) -> tuple[object, ...]:
    """What of a step is the same for all inputs of one shape."""
    if isinstance(node, Kernel):
        return node.grid, node.block, node.shared, node.cluster, list(map(len, node.arguments)), node.after
    return (node.arguments, node.after) if isinstance(node, Operator) else (node.after,)


def digest_of(forwards: Iterable[Forward]) -> str:
    """Of which kernels and operators there are, on what shapes: a tuned kernel may be launched in several ways."""
    steps = dict.fromkeys(repr([_identity(node) for node in forward.nodes]) for forward in forwards)
    return hashlib.sha256("\n".join(steps).encode()).hexdigest()


def _identity(node: Any) -> tuple[object, ...]:
    if isinstance(node, Kernel):
        return node.artifact, node.name
    tensors = (*node.tensors, *node.results) if isinstance(node, Operator) else ()
    return _name(node), [(meta.dtype, tuple(meta.shape)) for meta in tensors]


def _name(node: Any) -> str:
    if isinstance(node, Operator):
        return node.name
    return "aten::fill_" if type(node).__name__ == "Memset" else "aten::copy_"
