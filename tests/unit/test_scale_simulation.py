"""The simulation of `benchmarks.scale`, small: it comes to its end, and notices a ledger that breaks a rule."""

from __future__ import annotations

import random

import pytest

from benchmarks.scale.simulation import Scenario, Simulation, SimulationError
from protocols import events as ev
from protocols.ledger import Ledger

SMALL = Scenario(workers=24, batches=3, group_size=4, groups_per_batch=4, lifetime_s=60.0, refused=0.05, seed=1)
HASTY = Scenario(workers=8, batches=40, group_size=2, groups_per_batch=1, hold_s=0.0, train_s=0.1, seed=1)
"""Slow rollouts of the first batches come late to their next stage."""


class Timeless(Ledger):
    """Lets work go on however old it is."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        for task in self.tasks:
            task.max_staleness = -1
        return super().handle(event, now)


class Forgetful(Ledger):
    """Does not count every end."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = super().handle(event, now)
        self.counters["finished"] -= sum(isinstance(action, ev.Finish) for action in actions[:1])
        return actions


def test_a_run_with_dying_workers_ends_with_every_task_ended_once() -> None:
    simulation = Simulation(SMALL)
    simulation.run()
    counters = simulation.ledger.counters
    assert simulation.is_over
    assert len(simulation.trained_at) == SMALL.batches
    assert simulation.deaths > 10
    assert counters["lost"] > 0
    assert counters["submitted"] == counters["finished"] > 0
    assert set(simulation.lags) <= {0, 1}


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = Simulation(SMALL), Simulation(SMALL)
    first.run()
    second.run()
    assert (first.now, first.ledger.counters) == (second.now, second.ledger.counters)


def test_the_simulation_notices_work_that_goes_out_too_old() -> None:
    honest = Simulation(HASTY)
    honest.run()
    assert honest.ledger.counters["stale"] > 0
    with pytest.raises(SimulationError, match="I2"):
        Simulation(HASTY, Timeless(rng=random.Random(0))).run()


def test_the_simulation_notices_counters_that_do_not_add_up() -> None:
    with pytest.raises(SimulationError, match="I1"):
        Simulation(SMALL, Forgetful(rng=random.Random(0))).run()
