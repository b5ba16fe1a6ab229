"""What a caller may choose about verification and timing."""

from __future__ import annotations

import msgspec

from kbrl_async.sandbox import Limits
from kbrl_async.timing import Recipe


class BenchOptions(msgspec.Struct, frozen=True):
    cores: tuple[int, ...] = ()
    """Children, and the calling thread while it times, are pinned to these. One core: candidates get no
    threads at all.
    """
    deadline_s: float = 2.0
    """For one candidate, from its fork to the last correctness call."""
    call_floor_s: float = 0.25
    call_factor: float = 50.0
    """One call may take `max(call_floor_s, call_factor × the reference's time)`."""
    reference_deadline_s: float = 60.0
    references: int = 8
    """Problems whose reference child is kept."""
    reuse: int = 64
    """Candidates that see the same secret input sets before new ones are drawn."""
    pool: int = 4
    """Secret draws that timed inputs are mixed from."""
    slots: int = 3
    copy_outputs: bool = False
    """Children copy outputs into their arena inside each call. Set by itself where the host lets nobody read
    a child.
    """
    recipe: Recipe = msgspec.field(default_factory=Recipe)
    limits: Limits = msgspec.field(default_factory=Limits)
