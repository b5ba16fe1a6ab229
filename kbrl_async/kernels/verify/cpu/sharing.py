"""One candidate's own process for all workloads of one module: forked, confined and built once.

It is attached to one workload's inputs after the other. What a workload leaves in it is what an earlier call leaves in
any process: sets are new, one is repeated, and a replay, a proof and a measurement have processes of their own.
"""

from __future__ import annotations

import random

from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.verify.device import Device
from kbrl_async.kernels.verify.options import BenchOptions
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import Judged
from protocols.records import Candidate


class SharedChild:
    """`Opens` for one candidate; its children end with the block."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: dict[int, Judged] = {}

    def __enter__(self) -> SharedChild:
        return self

    def __exit__(self, *_: object) -> None:
        while self._kept:
            self._kept.popitem()[1].close()

    def judged(
        self,
        reference: Reference,
        zygote: Zygote,
        candidate: Candidate,
        artifacts: dict[str, str],
        options: BenchOptions,
        rng: random.Random,
        is_alone: bool,
    ) -> Judged:
        """`is_alone`: a new one, for who asks alone."""
        kept = None if is_alone else self._kept.get(reference.module_id)
        if kept is not None:
            return kept
        made = self._device.judged(reference, zygote, candidate, artifacts, options, rng, is_alone)
        if not is_alone:
            self._kept[reference.module_id] = made
        return made

    def release(self, session: Judged) -> None:
        if not any(session is kept for kept in self._kept.values()):
            self._device.release(session)
