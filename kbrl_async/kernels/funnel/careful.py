"""`bench`: one candidate through the funnel, and its time as carefully as this host can measure it.

Against `verify`, which measures as a run does: more pairs, a smaller interval, and other baselines beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.funnel.reading import Reading, read_candidate
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.funnel.verifier import (
    Verifier,
    VerifyOptions,
    choose_device,
    default_bench,
    load,
    read_text,
    shapes_for,
    under,
)
from kbrl_async.kernels.settings import Outputs, Rules, TimingBench
from kbrl_async.kernels.timing import Recipe, resolution
from kbrl_async.kernels.timing.baselines import Prior, Priors, prior_key
from kbrl_async.kernels.timing.device import hardware_of
from kbrl_async.kernels.timing.peaks import peaks_of
from kbrl_async.kernels.timing.recipe import CAREFUL_PAIRS_A_PLACE
from kbrl_async.kernels.timing.roofline import fraction
from kbrl_async.kernels.verify import BenchOptions
from kbrl_async.kernels.verify.floor import counted
from protocols.records import Candidate, Problem, Timing


class Careful(msgspec.Struct, frozen=True):
    """How long and how exactly is measured."""

    cap_s: float = 5.0
    """Most seconds of one measurement."""
    resolution: float = 0.01
    """Half width of the interval, as a share, at which it ends."""
    pairs_a_place: int | None = None
    """On a GPU: other memory for both sides after so many pairs; None: as is usual."""
    core: int | None = None
    """On a CPU; None: the last one that this process may use."""
    patience_s: float = 20.0
    """How long one measurement waits, in all, for moments in which others leave the core alone."""

    @property
    def recipe(self) -> Recipe:
        return Recipe.of(
            TimingBench(max_pairs=200, cap_s=self.cap_s),
            resolution=self.resolution,
            looks=10,
            warmup=10,
            warmup_s=0.025,
            patience_s=self.patience_s,
            pairs_a_place=CAREFUL_PAIRS_A_PLACE if self.pairs_a_place is None else self.pairs_a_place,
            enough_below=0.0,
        )


def bench(
    problem: Problem | str | Path,
    candidate: Candidate | str | Path,
    backend: str | None = None,
    *,
    device: str | None = None,
    problems: str = "",
    baselines: Sequence[str] = (),
    careful: Careful | None = None,
    rules: Rules = "open",
    outputs: Outputs | None = None,
) -> Result:
    """The same as `verify`, with a careful time; some twenty seconds.

    :param baselines: `compile`, `compile-max-autotune`: also compared with, in `timing.baselines`; those that this
        host can't make are in `missing_baselines`, each with the reason.
    :raises UserError: and what else `verify` raises.
    """
    careful = careful or Careful()
    reading = Reading(candidate, origin="file") if isinstance(candidate, Candidate) else _read(candidate, backend)
    chosen = choose_device(reading.candidate.backend if reading.candidate else backend or "", device)
    if not isinstance(problem, Problem):
        problem = load(problem, problems, shapes_for(chosen))
    options = VerifyOptions(cores=bench_cores(chosen, careful.core), bench=careful_bench(chosen, careful))
    options = under(options, rules, outputs)
    missing: dict[str, str] = {}
    with Verifier(chosen, options) as verifier:
        result = verifier.verify(problem, reading, backend)
        timing = result.timing
        if timing is not None and baselines:
            judge = verifier.judge(chosen, result.backend)
            remember = prior_keeper(problem.source, hardware_of(chosen))
            timing, missing = judge.baselines.beside(problem, timing, tuple(baselines), remember)
    if timing is not None:
        result = msgspec.structs.replace(result, timing=_with_flops(timing, problem, options))
    return msgspec.structs.replace(result, missing_baselines=missing)


def _read(candidate: str | Path, backend: str | None) -> Reading:
    return read_candidate(read_text(candidate), backend)


def bench_cores(device: str, core: int | None = None) -> tuple[int, ...]:
    """One core for a CPU bench; a GPU bench keeps what it has.

    :raises UserError: this process may not use that core.
    """
    if device.startswith("cuda"):
        return ()
    lent = sorted(os.sched_getaffinity(0))
    if core is not None and core not in lent:
        raise UserError(f"this host lends no core {core}", f"Choose among {','.join(map(str, lent))}")
    return (lent[-1] if core is None else core,)


def careful_bench(device: str, careful: Careful) -> BenchOptions:
    """A bench that measures so, with this host's peaks and what an earlier session found that it can tell apart."""
    recipe, folder, hardware = careful.recipe, resolution.cache_folder(), hardware_of(device)
    report = resolution.load(folder / resolution.file_name(hardware), hardware)
    if report is not None:
        recipe = msgspec.structs.replace(recipe, resolved=report.points())
    peaks = peaks_of(device, folder, hardware)
    return msgspec.structs.replace(default_bench(bench_cores(device, careful.core), recipe), device=device, peaks=peaks)


def _with_flops(timing: Timing, problem: Problem, options: VerifyOptions) -> Timing:
    """The fraction of the roofline by bytes and flops; as it is, by bytes alone, where flops can't be counted."""
    work = counted(problem)
    peaks = None if options.bench is None else options.bench.peaks
    if work is None or peaks is None:
        return timing
    return msgspec.structs.replace(timing, roofline=fraction(work, peaks, timing.candidate_ms))


def prior_keeper(source: str, hardware: str) -> Callable[[str, Timing], None]:
    """Keeps what a baseline took as a prior for later sessions, which measure it anew."""
    import torch

    priors = Priors(resolution.cache_folder() / "baseline-priors.json")

    def remember(name: str, timing: Timing) -> None:
        key = prior_key(source, hardware, {"torch": torch.__version__}, name)
        priors.put(key, Prior(timing.candidate_ms, timing.reference_ms))

    return remember
