"""What a run costs: GPU-hours, core-hours and, by the user's own price table, money. Pure.

::

    stage times of a measured run ─┐
    configuration: updates, P·G ───┴─ hours_of ─▶ hours ─ bill ─▶ GPU-hours, core-hours, money
    lines of a run ─ spent_hours ───────────────────┘

A forecast is as good as its times: the same device, as many tokens, the same share of answers that reach the bench.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.lab.plan import MAX_GAP_S, RunObservation
from kbrl_async.runs.config import Config
from kbrl_async.runs.settings import prices_of
from kbrl_async.runs.telemetry.system_metrics import SystemSample
from protocols.messages import Stage

CORE, GPU = "core", "gpu"


class Machine(msgspec.Struct, frozen=True):
    """What is paid for while a run lasts."""

    gpus: int
    gpu_name: str = ""
    cores: int = 0


class Bill(msgspec.Struct, frozen=True):
    hours: float
    machine: Machine
    money: float | None
    """None: the price table has nothing for it."""

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.machine.gpus

    @property
    def core_hours(self) -> float:
        return self.hours * self.machine.cores

    def format(self, currency: str) -> str:
        parts = [f"{self.hours:.2f} h"]
        if self.machine.gpus:
            parts.append(f"{self.gpu_hours:.2f} GPU-hours")
        parts.append(f"{self.core_hours:.2f} core-hours")
        if self.money is not None:
            parts.append(f"{self.money:.2f} {currency}".rstrip())
        return ", ".join(parts)


def bill(hours: float, machine: Machine, prices: Mapping[str, float]) -> Bill:
    """:param prices: of an hour: `core`, a part of a GPU's name, or `gpu` for any other."""
    gpu, core = _of_gpu(machine.gpu_name, prices), prices.get(CORE)
    if (gpu if machine.gpus else core) is None:
        return Bill(hours, machine, None)
    return Bill(hours, machine, hours * (machine.gpus * (gpu or 0.0) + machine.cores * (core or 0.0)))


def _of_gpu(name: str, prices: Mapping[str, float]) -> float | None:
    """The longest name in the table that is a part of this one."""
    fitting = [part for part in prices if part not in (CORE, GPU) and part.lower() in name.lower()]
    return prices[max(fitting, key=len)] if fitting else prices.get(GPU)


def rollouts_of(config: Config, heldout: int) -> int:
    """Answers that a whole run asks for: of training, and of its evaluations of so many problems."""
    turns = config.max_turns if config.mode != "single_turn" else 1
    between = (config.max_steps - 1) // config.eval_every if config.eval_every else 0
    rounds = 2 + between if config.eval_samples else 0
    return turns * (config.max_steps * config.batch_size * config.group_size + rounds * config.eval_samples * heldout)


def hours_of(config: Config, observed: RunObservation, target: float, heldout: int) -> float:
    """Of a whole run with these stage times: the slowest of samplers, benches and learner sets the pace, and is busy
    for `target` of the time."""
    counts = config.processes
    servers = {Stage.GENERATE: counts.sampler, Stage.BENCH: counts.timing_bench, Stage.TRAIN: 1}
    if observed.visits(Stage.VERIFY):
        servers[Stage.VERIFY] = max(1, counts.verifier)
    demand = max(observed.demand(stage) / count for stage, count in servers.items())
    hours = rollouts_of(config, heldout) * demand / target / 3600
    return hours if config.max_minutes is None else min(hours, config.max_minutes / 60)


def spent_hours(samples: Sequence[SystemSample]) -> float:
    """Since its start; a gap, in which it was stopped, is not paid for."""
    return sum(min(MAX_GAP_S, max(0.0, b.t - a.t)) for a, b in itertools.pairwise(samples)) / 3600


def left_hours(config: Config, samples: Sequence[SystemSample], observed: RunObservation) -> float:
    """To the last update at the pace so far; the evaluation after training is not in it."""
    done = max((sample.policy_version for sample in samples), default=0)
    left = max(0, config.max_steps - done) * observed.seconds / max(1, observed.updates) / 3600
    if config.max_minutes is None:
        return left
    return min(left, max(0.0, config.max_minutes / 60 - observed.seconds / 3600))


def prices(config: Config, more: Sequence[str]) -> dict[str, float]:
    """The table of the configuration with those of the command line."""
    return {**prices_of(config.cost.prices), **prices_of(more)}
