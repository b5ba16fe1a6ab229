"""What staleness can gain, by where the time goes: updates an hour with S = 1, 2, 4 over those with S = 0, simulated.

    python -m benchmarks.overlap [--updates 60] [--tail 0.5]

Real ledger, sessions and group book under a simulated clock (`scale_simulation`): one sampler with 64 places, one bench
that does one candidate at a time, one learner; 8 groups of 8. A stage's cost is what 64 rollouts take of it alone.
S = 0 is no naive loop: an answer is verified while others are still being written. The anchor is S = 0 of the same
seed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

from benchmarks.scale_simulation import Scenario, SimulatedWorker, Simulation
from protocols import messages as msg
from protocols.messages import Stage

BATCH = 64
WHOLE_S = 100.0
"""All three stages of a batch together: long beside the beat at which batches are looked for."""
LAGS = (0, 1, 2, 4)
COSTS = {
    "verifying alone, as measured on one H200": (0.01, 0.98, 0.01),
    "verifying twice as dear as generating": (0.3, 0.6, 0.1),
    "generating and verifying alike": (0.45, 0.45, 0.1),
    "all three alike": (0.33, 0.34, 0.33),
    "generating twice as dear as verifying": (0.6, 0.3, 0.1),
}
"""Shares of generating, verifying, training."""


class OneOfEach(Simulation):
    """A sampler, a compiler that is never waited for, a bench, a learner."""

    def __init__(self, scenario: Scenario, tail: float) -> None:
        self.tail = tail
        super().__init__(scenario)

    def _fleet(self) -> list[SimulatedWorker]:
        able = {msg.BACKENDS: "c, triton"}
        bench = SimulatedWorker("bench", [Stage.BENCH], 1, {**able, msg.HARDWARE: "h200"}, self.rng)
        sampler = SimulatedWorker("sampler", [Stage.GENERATE], BATCH, {}, self.rng)
        return [sampler, SimulatedWorker("farm", [Stage.COMPILE], BATCH, able, self.rng), bench]

    def _takes_s(self, stage: str) -> float:
        generate_s, compile_s, bench_s = self.scenario.mean_s
        match stage:
            case Stage.GENERATE:
                return generate_s * self.rng.lognormvariate(-(self.tail**2) / 2, self.tail)
            case Stage.COMPILE:
                return compile_s
            case Stage.BENCH:
                return bench_s
            case Stage.TRAIN:
                return self.scenario.train_s
        return 0.0


def updates_per_hour(costs: tuple[float, float, float], lag: int, updates: int, tail: float) -> float:
    """The sampler has 64 places: a batch takes an answer's time, and its longest answer more."""
    generate, verify, train = (share * WHOLE_S for share in costs)
    scenario = Scenario(
        workers=3,
        batches=updates,
        groups_per_batch=8,
        max_lag=lag,
        mean_s=(generate, 0.01, verify / BATCH),
        train_s=train,
        lifetime_s=float("inf"),
        wrong=0.0,
        refused=0.0,
    )
    simulation = OneOfEach(scenario, tail)
    simulation.run()
    done = simulation.trained_at
    return 3600 * (len(done) - 1) / (done[-1] - done[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--tail", type=float, default=0.5, help="σ of an answer's lognormal length")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    print("| time goes to | " + " | ".join(f"S = {lag}" for lag in LAGS[1:]) + " |\n" + "|---" * len(LAGS) + "|")
    for name, costs in COSTS.items():
        rates = {lag: updates_per_hour(costs, lag, asked.updates, asked.tail) for lag in LAGS}
        ratios = {lag: round(rates[lag] / rates[0], 2) for lag in LAGS[1:]}
        found[name] = {"updates_per_hour": {lag: round(rate, 1) for lag, rate in rates.items()}, "ratio": ratios}
        print(f"| {name} | " + " | ".join(f"{ratio}" for ratio in ratios.values()) + " |", flush=True)
    machine = f"{platform.machine()}, simulated time"
    print(json.dumps({"benchmark": "overlap", "machine": machine, "tail": asked.tail, "by_cost": found}))


if __name__ == "__main__":
    main()
