"""How many updates an hour a run would make at other stalenesses: its own stage times under a simulated clock."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from benchmarks.harness import Result
from benchmarks.scale.simulation import Scenario, SimulatedWorker, Simulation
from benchmarks.staleness.overlap import LAGS, updates_per_hour
from kbrl_async.errors import UserError
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.folder import load_run
from protocols import messages as msg
from protocols.messages import Stage

LEAST = 10
"""Updates; of a few, the first are made of batches that wait for a learner that starts."""


class Observed(msgspec.Struct, frozen=True):
    """What a run took and how it was set."""

    taken: Mapping[str, Sequence[float]]
    """Seconds of each task, by stage."""
    train_s: Sequence[float]
    """Of each update but the first, which compiles and allocates."""
    between_s: Sequence[float]
    """Seconds between the ends of two updates."""
    processes: Mapping[str, int]
    """Samplers, compile farms and benches, by stage."""
    slots: int
    """Places of a sampler."""
    groups: int
    """Of a batch."""
    group_size: int
    max_staleness: int


class Replayed(Simulation):
    """A run's processes; each task takes as long as one of its tasks at that stage did, drawn anew. For a compiler
    hardly anything waits: it has 64 places."""

    def __init__(self, observed: Observed, lag: int, updates: int, seed: int = 0) -> None:
        self._observed = observed
        scenario = Scenario(
            workers=sum(observed.processes.values()), batches=updates, max_staleness=lag, seed=seed,
            groups_per_batch=observed.groups, group_size=observed.group_size,
            lifetime_s=float("inf"), wrong=0.0, refused=0.0,
        )  # fmt: skip
        super().__init__(scenario)

    def _fleet(self) -> list[SimulatedWorker]:
        able = {msg.BACKENDS: "c, triton"}
        caps = {Stage.GENERATE: {}, Stage.COMPILE: able, Stage.BENCH: {**able, msg.HARDWARE: "h200"}}
        slots = {Stage.GENERATE: self._observed.slots, Stage.COMPILE: 64, Stage.BENCH: 1}
        return [
            SimulatedWorker(f"{stage}.{n}", [stage], slots[stage], caps[stage], self.rng)
            for stage in caps
            for n in range(self._observed.processes[stage])
        ]

    def _takes_s(self, stage: str) -> float:
        known = self._observed.train_s if stage == Stage.TRAIN else self._observed.taken.get(stage, ())
        return self.rng.choice(known) if known else 0.0


def observe(run: Path) -> Observed:
    """
    :raises UserError: no run, or one of fewer than `LEAST` updates.
    """
    if not (run / FILE).is_file():
        raise UserError(f"{run} has no {FILE}", "Name a run's folder")
    config = load_run(run)
    taken = defaultdict[str, list[float]](list)
    with ArchiveReader(run / FILE) as archive:
        for row in archive.rows():
            for span in row.spans:
                taken[span.stage].append(span.seconds)
        updates = archive.updates()
    if len(updates) < LEAST:
        raise UserError(f"{run} made {len(updates)} updates: too few to tell", f"Take a run of {LEAST}")
    counts = config.processes
    return Observed(
        taken,
        [update.finished - update.started for update in updates[1:]],
        [now.finished - before.finished for before, now in itertools.pairwise(updates)],
        {Stage.GENERATE: counts.sampler, Stage.COMPILE: counts.compile_farm, Stage.BENCH: counts.timing_bench},
        config.sampler.slots,
        config.batch_size,
        config.group_size,
        config.max_staleness,
    )


def forecast(run: Path, updates: Annotated[int, "of each simulated run"] = 60) -> Result:
    """Updates an hour of a run at S = 0, 1, 2, 4: real ledger and rollout buffer, the run's own stage times.

    The anchor is what the run itself made: an hour by the median time between two of its updates, at its own
    staleness. What is left out: the time of a token depends on how many answers are under way, and a new version's way
    to the samplers.
    """
    observed = observe(run)
    rates = {lag: updates_per_hour(Replayed(observed, lag, updates)) for lag in sorted({*LAGS, observed.max_staleness})}
    made = 3600 / statistics.median(observed.between_s)
    print("| | " + " | ".join(f"S = {lag}" for lag in rates) + " |\n" + "|---" * (len(rates) + 1) + "|")
    print("| updates an hour | " + " | ".join(f"{rate:.0f}" for rate in rates.values()) + " |", flush=True)
    own = observed.max_staleness
    return {
        "updates_per_hour": rates, "over_s0": {lag: rate / rates[0] for lag, rate in rates.items()},
        "own_staleness": own, "made_per_hour": made, "forecast_over_made": rates[own] / made,
        "median_s": {stage: statistics.median(times) for stage, times in observed.taken.items()},
        "train_s": statistics.median(observed.train_s),
    }  # fmt: skip
