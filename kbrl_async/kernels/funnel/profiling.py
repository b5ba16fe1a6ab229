"""A verified kernel's profile: the funnel once, and around its timing all that this host can say of its speed."""

from __future__ import annotations

import functools

import msgspec

from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.funnel.reading import Reading, read_candidate
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.funnel.verifier import Verifier
from kbrl_async.kernels.profile import KernelFacts, Profile, Roofline, gpu
from kbrl_async.kernels.profile.counters import Counts
from kbrl_async.kernels.timing import resolution
from kbrl_async.kernels.timing.device import hardware_of
from kbrl_async.kernels.timing.peaks import peaks_of
from kbrl_async.kernels.timing.roofline import ReferenceWork
from kbrl_async.kernels.verify.floor import counted
from kbrl_async.kernels.verify.options import Tick, no_tick
from protocols.records import Candidate, Problem, Timing


class Profiled(msgspec.Struct, frozen=True):
    """`profile` is None where the candidate is wrong or was not timed."""

    result: Result
    profile: Profile | None = None


def profile(
    verifier: Verifier,
    problem: Problem,
    candidate: Candidate | str,
    backend: str | None = None,
    *,
    tick: Tick = no_tick,
) -> Profiled:
    """Verify, time and profile. Raises what `Verifier.verify` raises."""
    reading = read_candidate(candidate, backend) if isinstance(candidate, str) else Reading(candidate)
    seen = Counts()
    result = verifier.verify(problem, reading, backend, tick=tick, watch=seen)
    if result.timing is None or reading.candidate is None:
        return Profiled(result)
    tick()
    return Profiled(result, _profile(verifier, problem, reading.candidate, result, result.timing, seen.counts))


def _profile(
    verifier: Verifier,
    problem: Problem,
    candidate: Candidate,
    result: Result,
    timing: Timing,
    counts: dict[str, float],
) -> Profile:
    device, on_gpu = result.device, result.device.startswith("cuda")
    kernels, why = _gpu_kernels(verifier, problem, candidate, device) if on_gpu else ((), _uncounted(counts))
    return Profile(
        timing,
        device,
        _roofline(problem, device),
        "" if kernels else result.verdict.evidence,
        {} if on_gpu else counts,
        verifier.builder.remarks(candidate),
        kernels,
        (why,) if why else (),
    )


def _gpu_kernels(
    verifier: Verifier, problem: Problem, candidate: Candidate, device: str
) -> tuple[tuple[KernelFacts, ...], str]:
    builder = verifier.builder
    paths = artifact_paths(builder.store, builder.build(candidate, problem))
    return gpu.kernels(builder.context, problem, candidate, {key: str(path) for key, path in paths.items()}, device)


def _uncounted(counts: dict[str, float]) -> str:
    return "" if "cycles" in counts else "instructions and cache misses: this host has no counters for us"


def _roofline(problem: Problem, device: str) -> Roofline | None:
    work = _work(problem)
    peaks = peaks_of(device, resolution.cache_folder(), hardware_of(device))
    return None if work is None or peaks is None else Roofline.of(work, peaks)


@functools.lru_cache(64)
def _work(problem: Problem) -> ReferenceWork | None:
    """Counted once a process: it takes a child of its own."""
    return counted(problem)
