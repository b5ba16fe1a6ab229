"""The roofline of a problem as a bench knows it: bytes of the reference's own inputs, outputs and weights.

Flops need a run under a counter, see `counted`; bytes alone are enough to find a time that is impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kbrl_async.kernels.sandbox import Access, Limits, Zygote
from kbrl_async.kernels.timing import roofline
from kbrl_async.kernels.timing.roofline import Peaks, ReferenceWork
from kbrl_async.kernels.verify.reference import Reference
from protocols.records import Problem, Timing


def work_of(reference: Reference) -> ReferenceWork:
    """Bytes that a call must move. Of the weights only what the constructor made; flops are not known here."""
    weights = sum(
        math.prod(meta.shape) * _itemsize(meta.dtype) for _, meta in reference.ready.weights
    )  # counted once, though a kernel may keep them in a cache
    expected = reference.wanted
    return ReferenceWork(roofline.size_of(reference.examples), roofline.size_of(expected), weights)


def _itemsize(dtype: str) -> int:
    import torch

    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def counted(problem: Problem, deadline_s: float = 60.0) -> ReferenceWork | None:
    """Bytes and flops of a problem by shapes alone, in a confined child; None where that needs values, or fails."""
    with Zygote(("torch", "kbrl_async.kernels.timing.roofline")) as zygote:
        limits = Limits(cpu_s=int(deadline_s))
        child = zygote.spawn(
            "kbrl_async.kernels.timing.roofline:count_child", problem.source.encode(), (), limits, Access()
        )
        try:
            child.channel.settimeout(deadline_s)
            data = child.channel.recv(1 << 12)
        except OSError:
            return None
        finally:
            child.close()
    return msgspec.msgpack.decode(data, type=ReferenceWork | None) if data else None


class Floor:
    """Judges times of one problem. Without peaks, or for a problem that an audit found degenerate, it says nothing.

    `again` measures the peaks once more; None where that can't be done now, and then nobody is accused.
    """

    def __init__(
        self, reference: Reference, peaks: Peaks | None, again: Callable[[], Peaks | None] | None = None
    ) -> None:
        self._peaks, self._again = peaks, again
        self._is_degenerate = bool(reference.problem.flags)
        self._work = work_of(reference) if peaks is not None else ReferenceWork(0, 0)

    def is_beaten_by(self, timing: Timing) -> bool:
        if self._peaks is None or self._is_degenerate:
            return False
        return roofline.is_impossible(self._work, self._peaks, timing.candidate_ms)

    def evidence(self, first: Timing, second: Timing) -> str:
        """Of two independent measurements, if both are impossible by peaks that were just measured once more, and
        the trusted reference's times are not.
        """
        if not (self.is_beaten_by(first) and self.is_beaten_by(second)):
            return ""
        peaks = self._peaks if self._again is None else self._again()
        if peaks is None:
            return ""
        self._peaks = peaks
        if any(roofline.is_impossible(self._work, peaks, timing.reference_ms) for timing in (first, second)):
            return ""
        return roofline.evidence(self._work, peaks, (first.candidate_ms, second.candidate_ms))

    def noted(self, timing: Timing) -> Timing:
        if self._peaks is None:
            return timing
        share = roofline.fraction(self._work, self._peaks, timing.candidate_ms)
        return msgspec.structs.replace(timing, roofline=share)
