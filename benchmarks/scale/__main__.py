"""How large a run the ledger can hold. `python -m benchmarks.scale COMMAND`"""

from __future__ import annotations

import gc
import json
import sys
import types
from collections import deque
from typing import Annotated

import numpy as np

from benchmarks.harness import Commands, Result, percentiles
from benchmarks.scale.simulation import CLOCK, Scenario, Simulation
from protocols.messages import Stage

commands = Commands("scale", __doc__)
SETTLED_S = 30.0
"""Simulated time until queues and window are what they stay; rates are taken from here on."""
LAG = 3
"""S."""
STAGES = (Stage.GENERATE, Stage.COMPILE, Stage.BENCH)
SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


@commands
def simulate(
    workers: tuple[int, ...] = (100, 1000, 10_000),
    seconds: Annotated[float, "simulated"] = 180.0,
    window: Annotated[float, "rollouts under way for each worker, (S+1)·P·G in all"] = 2.0,
    seed: int = 0,
) -> Result:
    """The ledger with many workers in simulated time: throughput, fairness, staleness, memory, cost.

    Real ledger, sessions and group book with heavy-tailed work and dying workers; nothing is sent, so that sockets and
    the journal are not in these figures (`benchmarks.broker connections` measures those). Python's cyclic collector is
    off, because the simulator's own objects would be counted as the ledger's time. Times of the ledger are CPU time.
    The smallest fleet is the anchor.
    """
    gc.disable()
    rows = []
    for count in workers:
        rows.append(measure(count, seconds, window, seed))
        for name, value in rows[-1].items():
            print(f"  {name:16} {value}", file=sys.stderr)
        gc.collect()
    return {"rows": rows}


def measure(workers: int, seconds: float, window: float, seed: int) -> Result:
    p = max(2, round(window * workers / (8 * (LAG + 1))))
    scenario = Scenario(workers, 1_000_000, seconds, group_size=8, groups_per_batch=p, max_staleness=LAG, seed=seed)
    simulation = Simulation(scenario)
    simulation.run()
    counters, trained = simulation.ledger.counters, sum(simulation.lags.values())
    settled_s = simulation.now - SETTLED_S
    return {
        "workers": workers,
        "window": window,
        "simulated_s": simulation.now,
        "deaths": simulation.deaths,
        "results_per_s": sum(at >= SETTLED_S for at in simulation.results_at) / settled_s,
        "rollouts_per_s": sum(at >= SETTLED_S for at in simulation.scored_at) / settled_s,
        "batches": len(simulation.trained_at),
        "groups": {str(outcome): count for outcome, count in simulation.book.counts.items()},
        "shares": {str(stage): shares(simulation, stage) for stage in STAGES},
        "queue_wait_s": {str(stage): spread(simulation.waits_s[stage]) for stage in STAGES},
        "group_s": spread(simulation.group_s),
        "lag_share": {str(lag): n / trained for lag, n in sorted(simulation.lags.items())},
        "ledger": cost(simulation),
        "ledger_mb": size_of(simulation.ledger) / 1e6,
        "live": len(simulation.ledger.tasks.live),
        "status_ms": status_ms(simulation),
        "counters": {name: counters[name] for name in ("lost", "expired", "stale", "poisoned", "duplicates", "busy")},
    }


def status_ms(simulation: Simulation) -> float:
    """CPU of what the broker says of itself, once a second: a line for the metrics file and a viewer's report."""
    started = CLOCK()
    json.dumps(simulation.ledger.stats(simulation.now))
    simulation.ledger.status(simulation.now)
    return (CLOCK() - started) / 1e6


def size_of(root: object) -> int:
    """Bytes of all that can be reached from it, classes and code left out."""
    seen, queue, total = {id(root)}, deque([root]), 0
    while queue:
        found = queue.popleft()
        total += sys.getsizeof(found)
        for other in gc.get_referents(found):
            if id(other) not in seen and not isinstance(other, SHARED):
                seen.add(id(other))
                queue.append(other)
    return total


def spread(values: list[float]) -> dict[str, float]:
    p50, p99 = percentiles(values, 50, 99)
    return {"p50": p50, "p99": p99}


def shares(simulation: Simulation, stage: str) -> dict[str, float]:
    """Tasks given to the workers of a stage that lived all the time."""
    served = [w.served for w in simulation.workers if w.stages == [stage] and not w.deaths]
    square = sum(n * n for n in served)
    jain = sum(served) ** 2 / (len(served) * square) if square else 0.0
    return {"min": min(served), "mean": sum(served) / len(served), "max": max(served), "jain": jain}


def cost(simulation: Simulation) -> Result:
    """CPU of the ledger."""
    kinds = {kind: np.array(spent) / 1000 for kind, spent in simulation.event_ns.items()}
    events = np.concatenate([spent for kind, spent in kinds.items() if kind != "Tick"])
    total_s = float(events.sum() + kinds["Tick"].sum()) / 1e6
    return {
        "us_per_event": {"mean": float(events.mean()), "p99": float(np.percentile(events, 99))},
        "us_by_kind": {kind: float(spent.mean()) for kind, spent in sorted(kinds.items())},
        "events_per_simulated_s": sum(map(len, kinds.values())) / simulation.now,
        "cores": total_s / simulation.now,
        "us_per_task": 1e6 * total_s / max(1, simulation.ledger.counters["finished"]),
    }


if __name__ == "__main__":
    commands.main()
