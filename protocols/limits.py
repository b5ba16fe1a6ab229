"""The ledger's settings, per stage and for all, and the names of what it counts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from protocols.checking import CheckOptions
from protocols.quiet import QuietOptions


class StageOptions(msgspec.Struct, frozen=True):
    ttl_s: float = 30.0
    max_losses: int | None = 3
    """Losses after which a task is given up; None: it is tried for ever."""
    queue_limit: int = 10_000


class LedgerOptions(msgspec.Struct, frozen=True):
    heartbeat_s: float = 1.0
    missed_beats: int = 3
    """Beats that a worker may miss before it is suspected and gets nothing new."""
    reconnect_s: float = 15.0
    """After a restart of the broker, how long a worker may take to come back to what it holds (at most one lease):
    then somebody else gets it, and of two results the first counts."""
    no_worker_s: float = 300.0
    """How long a task waits at a stage whose workers all lack what it needs, before it ends as `no_worker`."""
    busy_retry_s: float = 0.5
    finished_limit: int = 100_000
    generate: StageOptions = StageOptions(ttl_s=60.0)
    compile: StageOptions = StageOptions(ttl_s=60.0)
    verify: StageOptions = StageOptions(ttl_s=30.0)
    bench: StageOptions = StageOptions(ttl_s=30.0)
    score: StageOptions = StageOptions(max_losses=None)
    hardware_wait_s: float = 60.0
    """How long a pinned group waits for a bench of its hardware while there are others."""
    checks: CheckOptions = CheckOptions()
    quiet: QuietOptions = QuietOptions()
    train: StageOptions = StageOptions(ttl_s=60.0)
    trained: StageOptions = StageOptions(max_losses=None)
    settings: str = ""
    """What workers must agree on, said in each Welcome."""
    likely_first: bool = False
    """A bench gets first what is likely to be right, see `affinity`."""

    @classmethod
    def of(cls, heartbeat_s: float, ttl_s: Mapping[str, float]) -> LedgerOptions:
        """The defaults with another heartbeat and other leases, by stage."""
        options = cls(heartbeat_s=heartbeat_s)
        changed = {name: msgspec.structs.replace(options.stage(name), ttl_s=ttl) for name, ttl in ttl_s.items()}
        return msgspec.structs.replace(options, **changed)

    def stage(self, stage: str) -> StageOptions:
        options: StageOptions = getattr(self, stage)
        return options


COUNTERS = (
    "submitted", "finished", "dispatched", "results", "duplicates", "lost", "expired", "nacked", "poisoned", "stale",
    "revoked", "retired", "busy", "unserved",
)  # fmt: skip
