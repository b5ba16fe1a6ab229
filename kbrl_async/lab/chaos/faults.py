"""What can be done to a run, to what of it, and when: plans, drawn from a seed or read from a file. Pure.

A new kind is a row of `TARGETS` and a method of `Injuries`. A plan as a file (TOML or YAML)::

    [[fault]]
    at_s = 5             # seconds after the run was at work …
    kind = "kill"
    target = "broker"

    [[fault]]
    after_update = 2     # … or as soon as so many updates were made
    kind = "partition"
    target = "learner"
    for_s = 4

A nanny gives a service up that crashes five times in a minute, and it should. A random plan therefore crashes none more
than `MOST_CRASHES` times in `CRASH_WINDOW_S`.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
import yaml

from kbrl_async.errors import UserError

SERVICES = ("broker", "learner", "sampler", "compile_farm", "timing_bench", "reward_aggregator")
WORKERS = SERVICES[1:]
NANNY = "nanny:"
"""Prefix: the nanny of a service, which under `kbrl train` ends the run; it is then continued."""
RUN, DISK = "run", "disk"
ZYGOTE, CANDIDATE, COMPILER = "zygote", "candidate", "compiler"
RANK = "rank"
"""Of the learner, not the first; only a plan names it, because most learners have one."""
FRAMES, ARTIFACT, CACHE, JOURNAL = "frames", "artifact", "cache", "journal"


class FaultKind(StrEnum):
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


LASTS: Mapping[FaultKind, Range] = {
    FaultKind.STOP: Range(0.5, 6.0),
    FaultKind.WEDGE: Range(60.0, 60.0),
    FaultKind.DELAY: Range(2.0, 6.0),
    FaultKind.PARTITION: Range(1.0, 6.0),
    FaultKind.DISK_FULL: Range(1.0, 4.0),
}
NANNIES = tuple(NANNY + name for name in SERVICES)
TARGETS: Mapping[FaultKind, tuple[str, ...]] = {
    FaultKind.KILL: (*SERVICES, RANK, ZYGOTE, CANDIDATE, COMPILER, *NANNIES, RUN),
    FaultKind.STOP: (*SERVICES, RANK, ZYGOTE, CANDIDATE),
    FaultKind.WEDGE: SERVICES,
    FaultKind.DELAY: WORKERS,
    FaultKind.PARTITION: WORKERS,
    FaultKind.CORRUPT: (FRAMES, ARTIFACT, CACHE, JOURNAL),
    FaultKind.DISK_FULL: (*SERVICES, DISK),
}
LINKED = frozenset({FaultKind.DELAY, FaultKind.PARTITION})
"""Kinds that need a proxy before the broker."""


class PlannedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault: at `at_s` seconds after the run was at work, or as soon as `after_update` updates were made."""

    kind: FaultKind
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
        fatal = self.kind in (FaultKind.KILL, FaultKind.WEDGE, FaultKind.DISK_FULL) and self.target in SERVICES
        return "broker" if self.target == JOURNAL else self.target if fatal else ""


def checked(fault: PlannedFault) -> PlannedFault:
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


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


MOST_CRASHES = 2
CRASH_WINDOW_S = 75.0
DELAYS_MS = (20.0, 400.0)


class RandomOptions(msgspec.Struct, frozen=True):
    """What a random plan is drawn from."""

    count: int
    seed: int
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    every_s: float = 4.0
    """Mean time from one fault to the next."""
    may_end_run: bool = False
    """Also nannies, and all processes at once; whoever started the run has to continue it then."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: list[PlannedFault]


def read_plan(path: Path) -> list[PlannedFault]:
    """:raises UserError: no such file, or it holds no plan."""
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
        plan = msgspec.convert(content, _File).fault
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}", "Name a plan, a TOML or YAML file") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise UserError(f"{path} is no plan: {error}", "docs/chaos.md shows one") from None
    return [checked(fault) for fault in plan]


def random_plan(options: RandomOptions) -> list[PlannedFault]:
    """`count` faults by ascending time; equal options give equal plans."""
    rng = random.Random(f"chaos.{options.seed}")
    plan: list[PlannedFault] = []
    at_s = 0.0
    while len(plan) < options.count:
        at_s += rng.uniform(0.5, 1.5) * options.every_s
        choices = [(kind, targets) for kind in options.kinds if (targets := _possible(kind, options, plan, at_s))]
        if not choices:
            continue  # every service has had its crashes of this minute
        kind, targets = rng.choice(choices)
        lasts = LASTS.get(kind)
        plan.append(
            PlannedFault(
                kind,
                rng.choice(targets),
                at_s=round(at_s, 2),
                for_s=round(rng.uniform(lasts.low, lasts.high), 2) if lasts else 0.0,
                delay_ms=round(rng.uniform(*DELAYS_MS), 0) if kind is FaultKind.DELAY else 100.0,
            )
        )
    return plan


def _possible(kind: FaultKind, options: RandomOptions, plan: Sequence[PlannedFault], now: float) -> list[str]:
    """Targets that may be hit now. What ends the run is rare: it takes all services' time, not one's."""
    recent = [fault for fault in plan if now - fault.at_s < CRASH_WINDOW_S]
    crashed = [fault.crashes for fault in recent]
    ended = any(fault.ends_run for fault in recent)
    found = []
    for target in TARGETS[kind]:
        fault = PlannedFault(kind, target)
        over = bool(fault.crashes) and crashed.count(fault.crashes) >= MOST_CRASHES
        unwanted = fault.ends_run and (ended or not options.may_end_run)
        if not over and not unwanted and target not in (DISK, RANK):
            found.append(target)
    return found
