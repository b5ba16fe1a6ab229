"""The bench against itself: trials of A/A and A/B, each with fresh processes, and the same pairs by other methods."""

from __future__ import annotations

import contextlib
import importlib.metadata
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kbrl_async.cli.bench_cases import SLOWER, Case, slower_candidate, slower_case
from kbrl_async.cli.bench_trials import Trials
from kbrl_async.errors import InfraError
from kbrl_async.kernels.timing.methods import Function, methods, ratio
from kbrl_async.kernels.timing.resolution import Report, Row, Trial, clock_range, summarise
from kbrl_async.kernels.verify import Bench
from protocols.records import BenchReport, Candidate, Problem, Timing

Tell = Callable[[str], None]
_LOSSES = 3


def aa(bench: Bench, chosen: Sequence[Case], pairs: int, tell: Tell, rng: random.Random, trials: Trials) -> None:
    """Until there are `pairs` measurements of a reference against itself in all, or time is over; the cases take turns,
    so that each sees all hours.
    """
    order = list(chosen)
    for number in range(sum(trials.count("aa", case.name) for case in chosen), pairs):
        if trials.is_over:
            return
        rng.shuffle(order)
        case = min(order, key=lambda case: trials.count("aa", case.name))
        tell(f"A/A {number + 1} of {pairs}: {case.name}")
        trials.add("aa", case.name, _trial(bench, case.problem, case.itself, 1.0))


def ab(bench: Bench, device: str, runs: int, tell: Tell, trials: Trials) -> None:
    """Until there are `runs` measurements of each known slowdown, or time is over."""
    case = slower_case(device)
    for number in range(runs):
        for name, times in SLOWER.items():
            if trials.is_over:
                return
            if trials.count("ab", name) > number:
                continue
            tell(f"A/B {number + 1} of {runs}: {name} slower")
            candidate, truth = slower_candidate(case, times)
            trials.add("ab", name, _trial(bench, case.problem, candidate, truth))


def _trial(bench: Bench, problem: Problem, candidate: Candidate, truth: float) -> Trial:
    report = _evaluated(bench, problem, candidate)
    if report.timing is None:
        verdict = report.verdict
        cause = f"a known kernel ended {verdict.fault.value}: {verdict.message or 'no timing'}"
        raise InfraError(cause, "The bench itself is wrong")
    return trial_of(report.timing, truth)


def _evaluated(bench: Bench, problem: Problem, candidate: Candidate) -> BenchReport:
    """Tried again where the host failed, as a run does (I4): after `_LOSSES` it is a fault to tell."""
    for _ in range(_LOSSES - 1):
        with contextlib.suppress(InfraError):
            return bench.evaluate(problem, candidate, {})
    return bench.evaluate(problem, candidate, {})


def trial_of(timing: Timing, truth: float) -> Trial:
    """As measured: what the interval was widened by is taken off again."""
    wide = 1 + timing.resolution
    return Trial(
        timing.speedup,
        timing.lo * wide,
        timing.hi / wide,
        timing.candidate_ms,
        timing.n,
        timing.spent_s,
        timing.stopped,
        truth,
        timing.load or 0.0,
        timing.clock_mhz,
        timing.throttle,
    )


def beside(case: Case, device: str, runs: int, budget_s: float) -> dict[str, float]:
    """Worst error of other methods on the same kernel against itself, with `budget_s` for each decision."""
    worst: dict[str, float] = {}
    for name, method in methods(device).items():
        errors = [abs(ratio(method, *_twins(case, device), budget_s) - 1) for _ in range(runs)]
        worst[name] = max(errors)
    return worst


def _twins(case: Case, device: str) -> tuple[Function, Function]:
    first, second = (_function(case, device) for _ in range(2))
    return first, second


def _function(case: Case, device: str) -> Function:
    """Our own source, so it may run in this process."""
    namespace: dict[str, Any] = {}
    exec(compile(case.source("Model"), "case.py", "exec"), namespace)  # noqa: S102 - a constant of ours
    model = namespace["Model"]().to(device)
    inputs = [tensor.to(device) for tensor in namespace["get_inputs"]()]

    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    return call


def report(
    hardware: str,
    trials: dict[str, list[Trial]],
    truths: dict[str, list[Trial]],
    others: dict[str, dict[str, float]],
) -> Report:
    rows = [summarise(name, found, **others.get(name, {})) for name, found in trials.items()]
    rows.sort(key=lambda row: row.ms)
    every = [trial for found in (*trials.values(), *truths.values()) for trial in found]
    known = Report(hardware, rows)
    return Report(
        hardware,
        rows,
        [_truth_row(name, found, known) for name, found in truths.items()],
        statistics.fmean(trial.load for trial in every) if every else 0.0,
        clock_range(every),
        sorted({reason for trial in every for reason in trial.throttle}),
        {name: importlib.metadata.version(name) for name in ("torch", "numpy")},
        time.time(),
    )


def _truth_row(name: str, found: list[Trial], known: Report) -> Row:
    """Widened as a reward would see it: by the resolution that A/A found at this length."""
    from kbrl_async.kernels.timing import share_at
    from kbrl_async.kernels.timing.recipe import PLACEMENT

    ms = statistics.median(trial.ms for trial in found)
    return summarise(name, found, share_at(ms, known.points(), PLACEMENT))
