"""What a caller may choose about verification and timing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from kbrl_async.kernels.backends.launch.uncompiled import ASKED
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.settings import Outputs, TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.timing.roofline import Peaks
from protocols.records import Strictness

Tick = Callable[[], None]
"""Called between two steps of what takes long."""

Watch = Callable[[int, Callable[[], object]], object]
"""Given the process that a correct candidate runs in, and what calls it there once: for counters, after its timing."""

_INTERPRETER_S = 60.0
_COMPILES = re.compile(rf"{ASKED}|\btorch\s*\.\s*_dynamo\b|\b(custom|triton)_op\b")
"""An operator that is registered so has torch import its compiler at the first call, for four seconds."""
ALONE_SHARE = 1 / 32
"""In training, of `BenchOptions.alone_share`. Each such process is a context made and one ended, for which the driver
lets all others on the GPU wait: at an eighth that was most of what a bench lost."""


def no_tick() -> None:
    """Nobody waits."""


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Made by `bench_options`; what has a default here is no setting."""

    device: str
    """`"cpu"` or `"cuda:N"`; the zygote's profile must fit: see `bench.zygote_for`."""
    cores: tuple[int, ...]
    """Children, and the calling thread while it times, are pinned to these. One core: candidates get no
    threads at all.
    """
    deadline_s: float
    """For one candidate, from its fork to the last correctness call."""
    call_floor_s: float = 0.25
    call_factor: float = 50.0
    """One call may take `max(call_floor_s, call_factor × the reference's time)`."""
    first_call_s: float = 2.0
    """What a candidate's first call may take where that is more: it compiles and tunes there, as far as the farm could
    not, and imports what torch has put off until then (of `torch.broadcast_shapes` that is .7 s)."""
    compiling_s: float = 60.0
    """For what torch compiles for a candidate: it does so at its first calls, and what it needs for that is imported
    where the candidate asks for it."""
    reference_deadline_s: float = 60.0
    references: int = 0
    """Problems whose reference child is kept; 0: as many as the device does by itself."""
    reference_bytes: int = 320 * 2**20
    """Host memory that the secrets of all kept references may take; the one in use is kept whatever it takes."""
    memory_share: float = 1.0
    """Of the device's memory, what this bench may plan with: a third where three benches are on it."""
    reuse: int = 64
    """Candidates that see the same secret input sets before new ones are drawn."""
    pool: int = 4
    """Secret draws that timed inputs are mixed from."""
    slots: int = 3
    is_light: bool = False
    """A secret few of the input sets: for a workload beside others, and where a verifier has looked at all."""
    is_proven: bool = True
    """Own kernels have to do the work: on workloads that are only checked it is enough to be right."""
    timed_workloads: int
    """As `TimingBench.timed_workloads`."""
    outputs: Outputs
    """As `TimingBench.outputs`."""
    check_s: float
    """As `TimingBench.check_s`: where candidates have a group, that is in training."""
    known: str = ""
    """A digest of steps (`Judged.plan`) that a verifier has found right and own: two of the sets are enough for a
    candidate that is recorded with these. Whether its own kernels are needed is asked all the same.
    """
    replay: bool = True
    """Where a candidate's work can be recorded, a replay of it is judged and timed; false: always its own process."""
    alone_share: float = 1.0
    """Where an earlier candidate may have spoilt the process that wrote a candidate's work down: the share of those
    with something against them that a process decides which has served nobody else (for the others it is enough that a
    second one writes down the same), and of right ones the share that a second one writes down, too.
    """
    copy_outputs: bool = False
    """Children copy outputs into their arena inside each call. Set by itself where the host lets nobody read
    a child.
    """
    peaks: Peaks | None = None
    """This host's, from `timing.peaks.peaks`: a time that beats them twice is evidence of cheating. None: see
    `Bench.probe`.
    """
    recipe: Recipe
    limits: Limits
    strictness: Strictness = Strictness()


def bench_options(
    settings: TimingBench,
    device: str = "cpu",
    cores: tuple[int, ...] = (),
    *,
    recipe: Recipe | None = None,
    limits: Limits | None = None,
    **more: Any,
) -> BenchOptions:
    """The options of a bench on `device`. `more` are fields of `BenchOptions` that are no settings."""
    return BenchOptions(
        device=device,
        cores=cores,
        deadline_s=settings.deadline_s,
        outputs=settings.outputs,
        check_s=settings.check_s,
        memory_share=more.pop("memory_share", 1.0) * settings.memory_share,
        timed_workloads=settings.timed_workloads,
        recipe=recipe or Recipe.of(settings),
        limits=limits or Limits(cores=cores),
        **more,
    )


def compiling_s(options: BenchOptions, source: str) -> float:
    """What torch may compile for, at a candidate's start and at its first calls; 0 where nothing asks it to."""
    return options.compiling_s if _COMPILES.search(source) else 0.0


def options_for_interpreter(options: BenchOptions) -> BenchOptions:
    """Triton's interpreter takes half a millisecond for each program instance."""
    return msgspec.structs.replace(
        options,
        deadline_s=max(options.deadline_s, _INTERPRETER_S),
        call_floor_s=max(options.call_floor_s, _INTERPRETER_S / 10),
    )
