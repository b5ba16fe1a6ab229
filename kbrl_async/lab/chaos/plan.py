"""Plans: drawn from a seed, or read from a file. Pure: a plan is the same whatever the run does with it.

A file (TOML or YAML)::

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
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from kbrl_async.errors import UserError
from kbrl_async.lab.chaos.faults import DISK, LASTS, TARGETS, Fault, Kind, checked

MOST_CRASHES = 2
CRASH_WINDOW_S = 75.0
DELAYS_MS = (20.0, 400.0)


class RandomOptions(msgspec.Struct, frozen=True):
    """What a random plan is drawn from."""

    count: int
    seed: int
    kinds: tuple[Kind, ...] = tuple(Kind)
    every_s: float = 4.0
    """Mean time from one fault to the next."""
    may_end_run: bool = False
    """Also nannies, and all processes at once; whoever started the run has to continue it then."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: list[Fault]


def read_plan(path: Path) -> list[Fault]:
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


def random_plan(options: RandomOptions) -> list[Fault]:
    """`count` faults by ascending time; equal options give equal plans."""
    rng = random.Random(f"chaos.{options.seed}")
    plan: list[Fault] = []
    at_s = 0.0
    while len(plan) < options.count:
        at_s += rng.uniform(0.5, 1.5) * options.every_s
        choices = [(kind, targets) for kind in options.kinds if (targets := _possible(kind, options, plan, at_s))]
        if not choices:
            continue  # every service has had its crashes of this minute
        kind, targets = rng.choice(choices)
        lasts = LASTS.get(kind)
        plan.append(
            Fault(
                kind,
                rng.choice(targets),
                at_s=round(at_s, 2),
                for_s=round(rng.uniform(lasts.low, lasts.high), 2) if lasts else 0.0,
                delay_ms=round(rng.uniform(*DELAYS_MS), 0) if kind is Kind.DELAY else 100.0,
            )
        )
    return plan


def _possible(kind: Kind, options: RandomOptions, plan: Sequence[Fault], now: float) -> list[str]:
    """Targets that may be hit now. What ends the run is rare: it takes all services' time, not one's."""
    recent = [fault for fault in plan if now - fault.at_s < CRASH_WINDOW_S]
    crashed = [fault.crashes for fault in recent]
    ended = any(fault.ends_run for fault in recent)
    found = []
    for target in TARGETS[kind]:
        fault = Fault(kind, target)
        over = bool(fault.crashes) and crashed.count(fault.crashes) >= MOST_CRASHES
        unwanted = fault.ends_run and (ended or not options.may_end_run)
        if not over and not unwanted and target != DISK:
            found.append(target)
    return found
