"""How torch's allocator takes a GPU's memory in a learner: in segments that grow, unless somebody chose otherwise.

Sequences of many lengths leave gaps between blocks of fixed size, up to a third of what a learner's process took of a
GPU; a segment that grows maps memory where it is missing. Nothing of it crosses to another process: weights travel by
NCCL and by files, whose buffers are copied into.
"""

from __future__ import annotations

from collections.abc import MutableMapping

SETTING = "PYTORCH_CUDA_ALLOC_CONF"
NAMES = ("PYTORCH_ALLOC_CONF", SETTING, "PYTORCH_HIP_ALLOC_CONF")
"""Torch reads these once, before its first allocation."""
GROWING = "expandable_segments:True"


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """In a process that is still without torch, and in those that it starts.

    >>> found = {}
    >>> let_segments_grow(found)
    >>> found
    {'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'}
    """
    if not any(name in environment for name in NAMES):
        environment[SETTING] = GROWING
