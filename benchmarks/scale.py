"""The ledger with 100, 1,000 and 10,000 workers in simulated time: throughput, fairness, staleness, memory, cost.

    python -m benchmarks.scale [--workers 100,1000,10000] [--seconds 180] [--window 2] [--seed 0]

`scale_simulation` runs the real ledger, sessions and group book with heavy-tailed work and dying workers; nothing is
sent, so that sockets and the journal are not in these figures (`benchmarks/connections.py` measures those). Python's
cyclic collector is off, because the simulator's own objects would be counted as the ledger's time. Times of the ledger
are CPU time. The smallest fleet is the anchor. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import types
from collections import deque

import numpy as np

from benchmarks.scale_simulation import CLOCK, Scenario, Simulation
from protocols.messages import Stage

SETTLED_S = 30.0
"""Simulated time until queues and window are what they stay; rates are taken from here on."""
LAG = 3
"""S."""
STAGES = (Stage.GENERATE, Stage.COMPILE, Stage.BENCH)
SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


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


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    """Median and 99th percentile."""
    if not values:
        return {"p50": 0.0, "p99": 0.0}
    middle, late = np.percentile(values, (50, 99))
    return {"p50": round(float(middle), digits), "p99": round(float(late), digits)}


def shares(simulation: Simulation, stage: str) -> dict[str, float]:
    """Tasks given to the workers of a stage that lived all the time."""
    served = [w.served for w in simulation.workers if w.stages == [stage] and not w.deaths]
    square = sum(n * n for n in served)
    jain = sum(served) ** 2 / (len(served) * square) if square else 0.0
    return {"min": min(served), "mean": round(sum(served) / len(served), 1), "max": max(served), "jain": round(jain, 3)}


def cost(simulation: Simulation) -> dict[str, object]:
    """CPU of the ledger."""
    kinds = {kind: np.array(spent) / 1000 for kind, spent in simulation.event_ns.items()}
    events = np.concatenate([spent for kind, spent in kinds.items() if kind != "Tick"])
    total_s = float(events.sum() + kinds["Tick"].sum()) / 1e6
    return {
        "us_per_event": {"mean": round(float(events.mean()), 1), "p99": round(float(np.percentile(events, 99)), 1)},
        "us_by_kind": {kind: round(float(spent.mean()), 1) for kind, spent in sorted(kinds.items())},
        "events_per_simulated_s": round(sum(map(len, kinds.values())) / simulation.now),
        "cores": round(total_s / simulation.now, 4),
        "us_per_task": round(1e6 * total_s / max(1, simulation.ledger.counters["finished"])),
    }


def measure(workers: int, seconds: float, window: float, seed: int) -> dict[str, object]:
    p = max(2, round(window * workers / (8 * (LAG + 1))))
    scenario = Scenario(workers, 1_000_000, seconds, group_size=8, groups_per_batch=p, max_lag=LAG, seed=seed)
    simulation = Simulation(scenario)
    simulation.run()
    counters, trained = simulation.ledger.counters, sum(simulation.lags.values())
    settled_s = simulation.now - SETTLED_S
    return {
        "workers": workers,
        "window": window,
        "simulated_s": round(simulation.now, 1),
        "deaths": simulation.deaths,
        "results_per_s": round(sum(at >= SETTLED_S for at in simulation.results_at) / settled_s, 1),
        "rollouts_per_s": round(sum(at >= SETTLED_S for at in simulation.scored_at) / settled_s, 1),
        "batches": len(simulation.trained_at),
        "groups": {str(outcome): count for outcome, count in simulation.book.counts.items()},
        "shares": {str(stage): shares(simulation, stage) for stage in STAGES},
        "queue_wait_s": {str(stage): spread(simulation.waits_s[stage]) for stage in STAGES},
        "group_s": spread(simulation.group_s),
        "lag_share": {str(lag): round(n / trained, 3) for lag, n in sorted(simulation.lags.items())},
        "ledger": cost(simulation),
        "ledger_mb": round(size_of(simulation.ledger) / 1e6, 1),
        "live": len(simulation.ledger.tasks.live),
        "status_ms": round(status_ms(simulation), 1),
        "counters": {name: counters[name] for name in ("lost", "expired", "stale", "poisoned", "duplicates", "busy")},
    }


def status_ms(simulation: Simulation) -> float:
    """CPU of what the broker says of itself, once a second: a line for the metrics file and a viewer's report."""
    started = CLOCK()
    json.dumps(simulation.ledger.stats(simulation.now))
    simulation.ledger.status(simulation.now)
    return (CLOCK() - started) / 1e6


def show(row: dict[str, object]) -> None:
    for name, value in row.items():
        print(f"  {name:16} {value}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", default="100,1000,10000")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument(
        "--window", type=float, default=2.0, help="rollouts under way for each worker, (S+1)·P·G in all"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    gc.disable()
    rows = []
    for workers in map(int, arguments.workers.split(",")):
        rows.append(measure(workers, arguments.seconds, arguments.window, arguments.seed))
        show(rows[-1])
        gc.collect()
    machine = f"{platform.machine()}, one core, Python {platform.python_version()}"
    print(json.dumps({"benchmark": "scale", "machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
