"""What can be done to a run, and to what of it. A new kind is a row of `TARGETS` and a method of `Injuries`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from kbrl_async.errors import UserError

SERVICES = ("broker", "learner", "sampler", "compile_farm", "timing_bench", "reward_aggregator")
WORKERS = SERVICES[1:]
NANNY = "nanny:"
"""Prefix: the nanny of a service, which under `kbrl train` ends the run; it is then continued."""
RUN, DISK = "run", "disk"
ZYGOTE, CANDIDATE, COMPILER = "zygote", "candidate", "compiler"
FRAMES, ARTIFACT, CACHE, JOURNAL = "frames", "artifact", "cache", "journal"


class Kind(StrEnum):
    KILL = "kill"
    """`kill -9`."""
    STOP = "stop"
    """SIGSTOP for a while, then SIGCONT."""
    WEDGE = "wedge"
    """SIGSTOP without SIGCONT: alive, and doing nothing. Ends when somebody has replaced the process."""
    DELAY = "delay"
    """Everything between the broker and the target arrives late."""
    PARTITION = "partition"
    """Nothing passes between the broker and the target; what was sent meanwhile arrives afterwards."""
    CORRUPT = "corrupt"
    """Garbage on the broker's sockets, or bytes of a file changed."""
    DISK_FULL = "disk-full"
    """No file of the target may grow, or (`disk`) nothing is left of the run's file system."""


class Range(msgspec.Struct, frozen=True):
    """Seconds that a random fault of a kind lasts."""

    low: float
    high: float


LASTS: Mapping[Kind, Range] = {
    Kind.STOP: Range(0.5, 6.0),
    Kind.WEDGE: Range(60.0, 60.0),
    Kind.DELAY: Range(2.0, 6.0),
    Kind.PARTITION: Range(1.0, 6.0),
    Kind.DISK_FULL: Range(1.0, 4.0),
}
NANNIES = tuple(NANNY + name for name in SERVICES)
TARGETS: Mapping[Kind, tuple[str, ...]] = {
    Kind.KILL: (*SERVICES, ZYGOTE, CANDIDATE, COMPILER, *NANNIES, RUN),
    Kind.STOP: (*SERVICES, ZYGOTE, CANDIDATE),
    Kind.WEDGE: SERVICES,
    Kind.DELAY: WORKERS,
    Kind.PARTITION: WORKERS,
    Kind.CORRUPT: (FRAMES, ARTIFACT, CACHE, JOURNAL),
    Kind.DISK_FULL: (*SERVICES, DISK),
}
LINKED = frozenset({Kind.DELAY, Kind.PARTITION})
"""Kinds that need a proxy before the broker."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault: at `at_s` seconds after the run was at work, or as soon as `after_update` updates were made."""

    kind: Kind
    target: str
    at_s: float = 0.0
    for_s: float = 0.0
    after_update: int = -1
    delay_ms: float = 100.0
    """Of kind `delay`: on each way."""

    @property
    def ends_run(self) -> bool:
        """Whether `kbrl train` ends with it and has to be continued."""
        return self.target == RUN or self.target.startswith(NANNY)

    @property
    def crashes(self) -> str:
        """The service whose child starts again because of it; empty: none does."""
        fatal = self.kind in (Kind.KILL, Kind.WEDGE, Kind.DISK_FULL) and self.target in SERVICES
        return "broker" if self.target == JOURNAL else self.target if fatal else ""


def checked(fault: Fault) -> Fault:
    """:raises UserError: it can't be done to that target, or has no length."""
    service = fault.target.partition(".")[0]
    allowed = TARGETS[fault.kind]
    if fault.target not in allowed and not ("." in fault.target and service in SERVICES and service in allowed):
        raise UserError(f"{fault.kind} can't be done to '{fault.target}'", f"Its targets: {', '.join(allowed)}")
    if fault.kind in LASTS and fault.for_s <= 0:
        raise UserError(f"{fault.kind} of {fault.target} has no length", "Give for_s, in seconds")
    if fault.at_s < 0 or fault.delay_ms < 0:
        raise UserError(f"{fault.kind} of {fault.target} has a time below 0", "Times count from when the run works")
    return fault
