"""What a bench knows of one problem: a reference for each of its workloads."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.workloads import Workload
from kbrl_async.kernels.verify import compare
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.rivals import sample_of
from protocols.records import Timing

WHOLE = Workload()
"""Of a problem that has no other."""


class WorkloadCase(msgspec.Struct, frozen=True):
    workload: Workload
    reference: Reference

    @property
    def tells(self) -> bool:
        """Whether its input sets have more than one answer: else a right one shows nothing of who made it. Sets that
        are not kept are not asked.
        """
        first, *others = self.reference.sets
        if not (others and self.reference.keeps_sets):
            return True
        pairs = (pair for other in others for pair in zip(first.expected, other.expected, strict=True))
        return any(not compare.same_values(*map(sample_of, pair)) for pair in pairs)


class KnownTiming(msgspec.Struct, frozen=True):
    """Of a source whose kernel was seen doing these steps."""

    steps: str
    timing: Timing


class Family:
    """The references of one problem, one for each workload; those of one module share a child and its weights."""

    def __init__(self, source: str, cases: list[WorkloadCase]) -> None:
        self.source, self.cases = source, cases
        self.uses = 0
        self.timings: dict[tuple[str, str], KnownTiming] = {}
        """By group and source, since its references have these secrets."""

    @property
    def references(self) -> list[Reference]:
        return [case.reference for case in self.cases]

    @property
    def host_bytes(self) -> int:
        return sum(reference.host_bytes for reference in self.references)

    @property
    def device_bytes(self) -> int:
        return sum(reference.device_bytes for reference in self.references)

    @property
    def needed(self) -> int:
        """Bytes at the peak of a verification, as predicted."""
        return max(reference.needed for reference in self.references)

    def close(self) -> None:
        for reference in self.references:
            reference.close()

    def retire(self) -> None:
        """Closed though it is sound: what it ran in may serve another."""
        for reference in self.references:
            reference.retire()
