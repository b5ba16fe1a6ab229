"""What held-out problems say of a version while it trains: TensorBoard tags as `kbrl eval` writes them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kbrl_async.runs.telemetry.training_metrics import RolloutStats, geometric_mean, speedups


def heldout_scalars(results: Sequence[RolloutStats]) -> dict[str, float]:
    """Nothing of nothing. `eval/policy_version_mean` tells which versions really wrote the answers."""
    if not results:
        return {}
    solved = {r.problem_id for r in results if r.correct}
    values: dict[str, float | None] = {
        "reward_mean": statistics.fmean(r.reward for r in results),
        "compile_rate": statistics.fmean(r.compiled for r in results),
        "correct_rate": statistics.fmean(r.correct for r in results),
        "hack_rate": statistics.fmean(r.cheated for r in results),
        "solved_rate": len(solved) / len({r.problem_id for r in results}),
        "fast_1": statistics.fmean(r.correct and (r.speedup or 0.0) > 1.0 for r in results),
        "proven_faster": statistics.fmean(r.fast for r in results),
        "speedup_geometric_mean": geometric_mean(speedups(results)),
        "policy_version_mean": statistics.fmean(r.policy_version for r in results),
    }
    return {f"eval/{name}": value for name, value in values.items() if value is not None}
