"""Who is to blame where the trusted side finds no memory on the GPU while a candidate lives there.

::

    allocation fails ─▶ the candidate is asked to give back what it can ─▶ what has it by the driver's word?
        ├─ known ─▶ is_hoarder
        └─ unknown ─▶ alone on the GPU: what its end made free ─▶ is_hoarder
                      beside others: nobody is blamed, for what came free may be theirs
"""

from __future__ import annotations

from kbrl_async.errors import InfraError
from protocols.records import Fault

_CONTEXT = 1 << 30
"""A CUDA context with its libraries and code."""
_FAIR = 2
_OUT_OF_MEMORY = 2
_WORDS = (
    "out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine",
)
"""The last is a convolution's: none of its ways got the memory that it works in."""

WAITED = "until there is memory"
"""A span, and the part of a stage."""


class NoMemory(InfraError):  # noqa: N818 - an answer as long as memory can be given back
    """The device has none left for us: others have it, or what is kept from earlier candidates."""


class Crowded(Exception):  # noqa: N818 - an answer as long as it can be waited for
    """Other verifiers plan with the memory now."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def is_out_of_memory(error: BaseException) -> bool:
    """An error of ours, by torch or the driver, or the fault of a reference's child."""
    if getattr(error, "kind", None) is Fault.OUT_OF_MEMORY or getattr(error, "code", None) == _OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and tells_of_memory(str(error))


def tells_of_memory(text: str) -> bool:
    return any(word in text for word in _WORDS)


def held_by_it(told: int | None, came_free: int, has_neighbours: bool) -> int:
    """Bytes that an ended process had: by the driver's word, else what its end made free. Beside others that may be
    theirs, and is nobody's fault.

    >>> held_by_it(None, 40 << 30, has_neighbours=True)
    0
    """
    if told is not None:
        return told
    return 0 if has_neighbours else came_free


def is_hoarder(held: int, needed: int) -> bool:
    """Whether a process held more than its work can need. Bytes of the GPU that it had, and what the problem's tensors
    take on the trusted side: its own weights and outputs are a part of that.

    >>> is_hoarder(60 << 30, 1 << 30)
    True
    >>> is_hoarder(2 << 30, 1 << 30)
    False
    """
    return held > _CONTEXT + _FAIR * needed
