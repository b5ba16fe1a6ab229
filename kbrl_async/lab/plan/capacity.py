"""From seconds per rollout to servers: the operational laws, with headroom. Pure.

With λ rollouts a second, stage *i* that costs Dᵢ server seconds per rollout and visits Vᵢ of it per rollout:

* utilisation law: ρᵢ = λ·Dᵢ/mᵢ, so mᵢ = ⌈λ·Dᵢ/ρ*⌉ servers keep it at or below the target ρ* (Denning and Buzen,
  "The operational analysis of queueing network models", 1978);
* wait in its queue, per visit (Erlang's C formula for M/M/m, scaled by variability as Allen and Cunneen do):
  Wᵢ ≈ c·C(mᵢ, λDᵢ)·(Dᵢ/Vᵢ) / (mᵢ(1−ρᵢ)), with c = (c²arrivals + c²service)/2;
* Little's law on the admission window (I2): a rollout holds its place from admission until its update is done, on
  average Σ Vᵢ(Hᵢ+Wᵢ), then half of a batch's gathering, P·G/2λ, then the update T. The window has (S+1)·P·G places,
  so λ ≤ (S+½)·P·G / (Σ Vᵢ(Hᵢ+Wᵢ) + T).

What bounds a given layout is the smallest of mᵢ/Dᵢ and the window's rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.lab.plan.observing import BROKER, STAGES, TRAIN, Observation

TARGET = 0.8
ONLY_ONE = {TRAIN: "learner", "score": "aggregator", BROKER: "broker"}
"""Stages served by one process, and how it is called: more load than it can carry needs a faster one."""
RESOURCES = {"generate": "samplers", "compile": "compile cores", "bench": "timing benches", **ONLY_ONE}


class Window(msgspec.Struct, frozen=True):
    """Admission: S, P and G."""

    max_staleness: int
    batch_size: int
    group_size: int

    @property
    def places(self) -> float:
        """Rollouts that may be on their way beside the half batch that gathers."""
        return (self.max_staleness + 0.5) * self.batch_size * self.group_size


class Resource(msgspec.Struct, frozen=True):
    """One stage in a plan."""

    stage: str
    name: str
    demand_s: float
    """Server seconds per rollout."""
    servers: int
    """How many it takes; 1 where there can only be one."""
    load: float
    """λ·D: servers that would be busy all the time."""
    utilisation: float
    wait_s: float
    """In its queue, per visit; infinite at a load that it can't carry."""
    limit_per_hour: float
    """Rollouts an hour at which these servers are never idle."""

    @property
    def is_overloaded(self) -> bool:
        return self.utilisation >= 1.0


class Plan(msgspec.Struct, frozen=True):
    rollouts_per_hour: float
    target: float
    resources: list[Resource]
    bottleneck: Resource
    """What saturates first if the load grows beyond this plan."""
    residence_s: float
    """From admission to the update, without the batch's gathering."""
    window_per_hour: float
    """Rollouts an hour that the admission window lets through; infinite where it is not known."""

    @property
    def problems(self) -> list[str]:
        """Why this rate can't be reached by adding processes, in words."""
        found = [
            f"{r.name}: would be busy {r.load:.0%} of the time, and a run has one"
            for r in self.resources
            if r.utilisation > self.target + 1e-9
        ]
        if self.window_per_hour < self.rollouts_per_hour:
            found.append(
                f"admission window: lets {self.window_per_hour:,.0f} an hour through; raise max_staleness or batch_size"
            )
        return found


def plan(
    observed: Observation,
    rollouts_per_hour: float,
    *,
    target: float = TARGET,
    variability: float = 1.0,
    window: Window | None = None,
) -> Plan:
    """Servers for a wished rate.

    :param target: largest utilisation that is planned for, in (0, 1).
    :param variability: c above; 1 is a Poisson stream of exponential times, bursts are more.
    :raises UserError: no positive rate, or a target outside of (0, 1).
    """
    if not rollouts_per_hour > 0 or not 0 < target < 1:
        raise UserError("a plan needs a rate above 0 and a utilisation between 0 and 1", "Such as 20000 and 0.8")
    rate = rollouts_per_hour / 3600
    resources = [_resource(observed, stage, rate, target, variability) for stage in RESOURCES]
    residence = _residence(observed, resources)
    admitted = window.places / residence * 3600 if window is not None and residence > 0 else math.inf
    tightest = min(resources, key=lambda r: r.limit_per_hour)
    return Plan(rollouts_per_hour, target, resources, tightest, residence, admitted)


def carried(observed: Observation, processes: Mapping[str, int] | None = None) -> tuple[float, str]:
    """Rollouts an hour at which the first stage is never idle, and which one: min mᵢ/Dᵢ.

    `processes` of each stage, compile farms included; where it says nothing, those that were measured.
    """
    given = processes or {}
    rates = {}
    for stage in (*STAGES, TRAIN):
        work = observed.stages.get(stage)
        if work is not None and work.busy_s > 0:
            count = given.get(stage, work.processes)
            rates[stage] = count * observed.rollouts / work.busy_s * 3600
    stage = min(rates, key=lambda name: rates[name])
    return rates[stage], stage


def wait_s(service_s: float, servers: int, utilisation: float, variability: float = 1.0) -> float:
    """Mean wait of one task in the queue of a stage; infinite from full load on."""
    if utilisation >= 1:
        return math.inf
    load, blocked = servers * utilisation, 1.0  # Erlang's B, by its recursion: factorials would overflow
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    waits = blocked / (1 - utilisation * (1 - blocked))
    return variability * waits * service_s / (servers * (1 - utilisation))


def _resource(observed: Observation, stage: str, rate: float, target: float, variability: float) -> Resource:
    demand, visits = observed.demand(stage), observed.visits(stage)
    load = rate * demand
    servers = 1 if stage in ONLY_ONE else max(1, math.ceil(load / target - 1e-9))
    limit = servers / demand * 3600 if demand > 0 else math.inf
    wait = wait_s(demand / visits if visits > 0 else demand, servers, load / servers, variability)
    return Resource(stage, RESOURCES[stage], demand, servers, load, load / servers, wait, limit)


def _residence(observed: Observation, resources: list[Resource]) -> float:
    """Σ Vᵢ(Hᵢ+Wᵢ) + T; a stage that is overloaded waits for ever, and is named as that instead."""
    total = observed.update_s
    for resource in resources:
        wait = 0.0 if resource.is_overloaded else resource.wait_s
        if resource.stage == TRAIN:
            total += wait
        elif resource.stage != BROKER:
            total += observed.visits(resource.stage) * (observed.held(resource.stage) + wait)
    return total
