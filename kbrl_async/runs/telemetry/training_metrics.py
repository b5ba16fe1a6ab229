"""From scored rollouts to the numbers that are watched. Pure arithmetic.

Invariants
* A mean over nothing is left out, never 0: a batch without a correct kernel has no speedup.
* `speedup` is that of correct, timed kernels only.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kbrl_async.kernels.backends.inline.ways import FAST
from kbrl_async.rollouts.stats import RolloutStats
from protocols.records import REPLAYED, SOLVER, VERIFIER


class Histograms(msgspec.Struct, frozen=True):
    """What a batch's histograms are made of."""

    rewards: list[float]
    speedups: list[float]
    advantages: list[float]


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean, None of nothing."""
    listed = list(values)
    return statistics.fmean(listed) if listed else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """exp of the mean logarithm, None of nothing."""
    listed = [value for value in values if value > 0]
    return statistics.geometric_mean(listed) if listed else None


def speedups(rollouts: Iterable[RolloutStats]) -> list[float]:
    """Of correct, timed kernels."""
    return [r.speedup for r in rollouts if r.correct and r.speedup is not None]


def outcome_rates(rollouts: Sequence[RolloutStats]) -> dict[str, float]:
    """reward_mean, format_rate, compile_rate, correct_rate, cheat_rate, fast_1, fast_1_proven, and speedup_mean and
    workload_rate where there is one, of the rollouts that wrote a kernel.

    `speedup_mean` is the geometric mean: 2× and ½× cancel, and one lucky problem does not outshine the rest.
    """
    rollouts = [r for r in rollouts if r.role != VERIFIER]
    values: dict[str, float | None] = {
        "reward_mean": mean(r.reward for r in rollouts),
        "format_rate": mean(r.format for r in rollouts),
        "compile_rate": mean(r.compiled for r in rollouts),
        "correct_rate": mean(r.correct for r in rollouts),
        "cheat_rate": mean(r.cheated for r in rollouts),
        "fast_1": mean(r.fast_1 for r in rollouts),
        "fast_1_proven": mean(r.fast_1_proven for r in rollouts),
        "speedup_mean": geometric_mean(speedups(rollouts)),
        "workload_rate": mean(r.workload_share for r in rollouts if r.workload_share is not None),
    }
    return _present(values)


def scalars(rollouts: Sequence[RolloutStats]) -> dict[str, float]:
    """TensorBoard tag → value for the batch of one update: what the learner was given, which measures no policy."""
    if len({r.role for r in rollouts}) > 1:
        by_role = {f"batch/reward_mean_{role}": _role_reward(rollouts, role) for role in {r.role for r in rollouts}}
        return scalars(kernels(rollouts)) | by_role
    return _batch(rollouts) | _age(rollouts) | _times(rollouts)


def kernels(rollouts: Iterable[RolloutStats]) -> list[RolloutStats]:
    """Those that wrote a kernel, all in one role."""
    return [msgspec.structs.replace(r, role=SOLVER) for r in rollouts if r.role != VERIFIER]


ALIASED = ("format_rate", "compile_rate", "correct_rate", "cheat_rate")
"""Of a version, also written as `rate/format` and so on, for those who come with dashboards of other programs."""


def version_scalars(answers: Sequence[RolloutStats], *, per_level: bool) -> dict[str, float]:
    """TensorBoard tag → value for all answers that a policy version wrote."""
    rates = outcome_rates(answers)
    values = {f"version/{name}": value for name, value in rates.items()}
    values |= {f"rate/{name.removesuffix('_rate')}": rates[name] for name in ALIASED if name in rates}
    if per_level:
        values |= _broken_down(answers, "level", lambda r: r.level)
    if any(r.turn for r in answers):
        values |= _broken_down(answers, "turn_", lambda r: r.turn + 1) | turn_scalars(answers)
    return values


def _role_reward(rollouts: Sequence[RolloutStats], role: str) -> float:
    return statistics.fmean(r.reward for r in rollouts if r.role == role)


def histograms(rollouts: Sequence[RolloutStats]) -> Histograms:
    return Histograms(
        rewards=[r.reward for r in rollouts],
        speedups=speedups(rollouts),
        advantages=[r.advantage for r in rollouts if r.advantage is not None],
    )


def progress(updates: int, max_steps: int, *, train_s: float, since: tuple[float, int] | None) -> dict[str, float]:
    """How far a run is and what an update took. `since`: seconds and scored rollouts since the update before."""
    values = {"progress/batch": float(updates), "progress/done_frac": updates / max_steps, "time/train_s": train_s}
    if since is not None and since[0] > 0:
        values |= {"time/total_s": since[0], "throughput/rollouts_per_s": since[1] / since[0]}
    return values


def policy_scalars(metrics: Mapping[str, float]) -> dict[str, float]:
    """The learner's own metrics under `policy/`, where they have no folder yet."""
    return {tag if "/" in tag else f"policy/{tag}": value for tag, value in metrics.items()}


def _batch(rollouts: Sequence[RolloutStats]) -> dict[str, float]:
    if not rollouts:
        return {}
    rewards = [r.reward for r in rollouts]
    right = [r for r in rollouts if r.correct and r.trust]
    values = outcome_rates(rollouts) | _present({
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "speedup_max": max(speedups(rollouts), default=None),
        "truncated_rate": mean(1.0 - r.completion_fraction for r in rollouts),
        "replayed_rate": mean(r.trust == REPLAYED for r in right),
        "full_build_rate": mean(any(way != FAST for way in r.built) for r in rollouts if r.built),
    })  # fmt: skip
    return {f"batch/{name}": value for name, value in values.items()}


def _age(rollouts: Sequence[RolloutStats]) -> dict[str, float]:
    ages = [r.staleness for r in rollouts if r.staleness is not None]
    if not ages:
        return {}
    by_stage = {
        f"staleness/at_{stage}_mean": mean(r.ages[stage] for r in rollouts if stage in r.ages)
        for stage in dict.fromkeys(stage for r in rollouts for stage in r.ages)
    }
    return {"staleness/versions_mean": statistics.fmean(ages), "staleness/versions_max": max(ages)} | _present(by_stage)


def _times(rollouts: Sequence[RolloutStats]) -> dict[str, float]:
    phases = dict.fromkeys(phase for r in rollouts for phase in r.seconds)
    times = {f"time/{p}_s": mean(r.seconds[p] for r in rollouts if p in r.seconds) for p in phases}
    times["time/rollout_s"] = mean(sum(r.seconds.values()) for r in rollouts if r.seconds)
    return _present(times | {"tokens/answer_mean": mean(r.tokens for r in rollouts)})


def _broken_down(rollouts: Sequence[RolloutStats], name: str, key: Callable[[RolloutStats], int]) -> dict[str, float]:
    return {
        f"{name}{part}/{tag}": value
        for part in sorted({key(r) for r in rollouts})
        for tag, value in outcome_rates([r for r in rollouts if key(r) == part]).items()
    }


def _present(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


# ── of whole rollouts that take several turns (Kevin mode), and of held-out problems ─────────────────────────────────


def trajectories(turns: Iterable[RolloutStats]) -> list[list[RolloutStats]]:
    """Turns that wrote a kernel, by rollout, each in order; rollouts in the order of their first scored turn."""
    found: dict[str, list[RolloutStats]] = {}
    for turn in (turn for turn in turns if turn.role != VERIFIER):
        found.setdefault(turn.rollout_id, []).append(turn)
    return [sorted(group, key=lambda t: t.turn) for group in found.values()]


def turn_scalars(turns: Sequence[RolloutStats]) -> dict[str, float]:
    """`multiturn/*`: success_rate (a turn is correct), avg_turns, the rates of all turns, correct_turns_max (of the
    rollout that has most), best_reward and best_speedup_mean (of a rollout's best turn), and how many compile errors
    the next turn repaired."""
    rollouts = trajectories(turns)
    if not rollouts:
        return {}
    flat = [turn for rollout in rollouts for turn in rollout]
    best = [max(speedups(rollout)) for rollout in rollouts if speedups(rollout)]
    return _present({
        "multiturn/success_rate": mean(any(t.correct for t in rollout) for rollout in rollouts),
        "multiturn/avg_turns": mean(len(rollout) for rollout in rollouts),
        "multiturn/format_rate": mean(t.format for t in flat),
        "multiturn/compile_rate": mean(t.compiled for t in flat),
        "multiturn/correct_rate": mean(t.correct for t in flat),
        "multiturn/correct_turns_max": float(max(sum(t.correct for t in rollout) for rollout in rollouts)),
        "multiturn/best_reward": mean(max(t.reward for t in rollout) for rollout in rollouts),
        "multiturn/best_speedup_mean": mean(best),
        "multiturn/compile_fix_rate": compile_fix_rate(turns),
    })  # fmt: skip


def compile_fix_rate(turns: Sequence[RolloutStats], turn: int = 0) -> float | None:
    """Of the rollouts whose turn `turn` was a compile error: how many compiled in the next turn."""
    pairs = [
        (first, second)
        for rollout in trajectories(turns)
        for first, second in itertools.pairwise(rollout)
        if first.turn == turn and first.fault == "compile_error"
    ]
    return statistics.fmean(second.compiled for _, second in pairs) if pairs else None


def turn_summary(
    first: Sequence[RolloutStats], last: Sequence[RolloutStats], every: Sequence[RolloutStats]
) -> dict[str, float | None]:
    """For `summary.json`: success within rollouts of the first and the last versions, and repairs in the second turn.

    Empty for a run of single turns.
    """
    if not any(turn.turn for turn in every):
        return {}
    return {
        "success_rate_first": turn_scalars(first).get("multiturn/success_rate"),
        "success_rate_last": turn_scalars(last).get("multiturn/success_rate"),
        "avg_turns": turn_scalars(every).get("multiturn/avg_turns"),
        "compile_fix_rate_first": compile_fix_rate(first),
        "compile_fix_rate_last": compile_fix_rate(last),
    }
