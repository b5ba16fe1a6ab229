"""What staleness gains: updates an hour with it over those without, simulated and in real runs."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from typing import Annotated

from benchmarks.harness import ROOT, Result, in_turn, say, summary_of
from benchmarks.scale.simulation import Scenario, SimulatedWorker, Simulation
from benchmarks.staleness.paced_sampler import STEP_MS
from kbrl_async.cli.launch import gave_up, python_module, python_service, start_and_wait
from kbrl_async.runs.config import load, process_counts
from kbrl_async.runs.folder import is_finished, prepare
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


def overlap(updates: int = 60, tail: Annotated[float, "σ of an answer's lognormal length"] = 0.5) -> Result:
    """What staleness can gain, by where the time goes: updates an hour with S = 1, 2, 4 over S = 0, simulated.

    Real ledger, sessions and group book under a simulated clock: one sampler with 64 places, one bench that does one
    candidate at a time, one learner; 8 groups of 8. A stage's cost is what 64 rollouts take of it alone. S = 0 is no
    naive loop: an answer is verified while others are still being written. The anchor is S = 0 of the same seed.
    """
    found: Result = {}
    print("| time goes to | " + " | ".join(f"S = {lag}" for lag in LAGS[1:]) + " |\n" + "|---" * len(LAGS) + "|")
    for name, costs in COSTS.items():
        rates = {lag: _of_costs(costs, lag, updates, tail) for lag in LAGS}
        ratios = {lag: rates[lag] / rates[0] for lag in LAGS[1:]}
        found[name] = {"updates_per_hour": rates, "ratio": ratios}
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios.values()) + " |", flush=True)
    return {"tail": tail, "by_cost": found}


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
        if stage == Stage.GENERATE:
            return generate_s * self.rng.lognormvariate(-(self.tail**2) / 2, self.tail)
        costs: dict[str, float] = {Stage.COMPILE: compile_s, Stage.BENCH: bench_s, Stage.TRAIN: self.scenario.train_s}
        return costs.get(stage, 0.0)


def _of_costs(costs: tuple[float, float, float], lag: int, updates: int, tail: float) -> float:
    """The sampler has 64 places: a batch takes an answer's time, and its longest answer more."""
    generate, verify, train = (share * WHOLE_S for share in costs)
    scenario = Scenario(
        workers=3, batches=updates, groups_per_batch=8, max_staleness=lag, mean_s=(generate, 0.01, verify / BATCH),
        train_s=train, lifetime_s=float("inf"), wrong=0.0, refused=0.0,
    )  # fmt: skip
    return updates_per_hour(OneOfEach(scenario, tail))


def updates_per_hour(simulation: Simulation) -> float:
    """Runs it; from its first update on."""
    simulation.run()
    done = simulation.trained_at
    return 3600 * (len(done) - 1) / (done[-1] - done[0])


# ── real runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def async_vs_sync(
    *settings: str,
    steps: Annotated[int, "updates of each run"] = 10,
    repeats: Annotated[int, "runs of each kind"] = 2,
    step_ms: Annotated[float | None, "least time of a decode step; default: what it takes"] = None,
) -> Result:
    """Updates an hour with overlap (S=2) against the synchronous baseline (S=0), same machine, same policy, in turn.

    Overlap gains where processes have cores of their own and generating costs about what verifying does: with
    --step-ms a token of all answers under way takes so long, as a larger model's does.
    """
    if step_ms is not None:
        os.environ[STEP_MS] = str(step_ms)
    found: dict[int, list[Result]] = {0: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat, lag in in_turn((0, 2), repeats):
            own = [f"log_path={folder}", f"name=lag{lag}-{repeat}", f"max_staleness={lag}", f"max_steps={steps}"]
            own += [f"seed={repeat}", "max_minutes=null", "eval_samples=0"]
            config = load([ROOT / "configs" / "default.yaml"], [*own, *settings])
            made = prepare(config).path
            ended = start_and_wait(made, process_counts(config), command=_service, output=sys.stderr)
            if not is_finished(made):
                raise gave_up(ended, "run", f"See {made / 'logs'}")
            found[lag].append(summary_of(made))
            say(f"S = {lag}: {found[lag][-1]['updates_per_hour']:.1f} updates an hour")
    rate = {lag: statistics.median(s["updates_per_hour"] for s in summaries) for lag, summaries in found.items()}
    return {
        "steps": steps, "repeats": repeats, "step_ms": step_ms, "settings": settings, "ratio": rate[2] / rate[0],
        "updates_per_hour": {f"S={lag}": value for lag, value in rate.items()},
        "busy": {f"S={lag}": _busy(summaries) for lag, summaries in found.items()},
    }  # fmt: skip


def _service(name: str) -> str:
    """The command of a service: the sampler's is paced where that was asked for."""
    is_paced = name == "sampler" and STEP_MS in os.environ
    return python_module("benchmarks.staleness.paced_sampler") if is_paced else python_service(name)


def _busy(summaries: list[Result]) -> dict[str, float]:
    """Each process's share of the time at work, the median of the runs."""
    return {name: statistics.median(s["busy"][name] for s in summaries) for name in summaries[0]["busy"]}
