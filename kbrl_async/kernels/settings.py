"""What can be set of kernels: the sections for building and for timing, and the doors of their parts. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.doors import Door
from kbrl_async.ranges import AtLeastOne, Count, Fraction, NonNegative, Positive

BACKENDS = Door(
    "backends",
    {
        "c": "kbrl_async.kernels.backends.c.build:BACKEND",
        "cpp": "kbrl_async.kernels.backends.inline.backend:CPP",
        "cuda": "kbrl_async.kernels.backends.inline.backend:CUDA",
        "cuda-nvrtc": "kbrl_async.kernels.backends.nvrtc.build:BACKEND",
        "triton": "kbrl_async.kernels.backends.triton.build:BACKEND",
    },
)
"""Each a `kernels.backends.Backend`."""
PROBLEM_SOURCES = Door(
    "problem_sources",
    {
        "suite": "kbrl_async.kernels.problems.sources.folder:suite",
        "kernelbench": "kbrl_async.kernels.problems.sources.folder:kernelbench",
        "generated": "kbrl_async.kernels.generator:generated",
        "grammar": "kbrl_async.lab.grammar:grammar",
    },
)
"""Each `(shapes) -> problems`, or the path of a folder or file of problems. `shapes` is `"cpu"` or `"gpu"`. `generated`
and `grammar` take a word more: `generated:500`."""
HELDOUT_SHARE, HELDOUT_SEED = 0.1, 0
"""Share of each level that is held out of a source that marks none, and by which seed."""
SplitKind = Literal["family", "kevin", "none"]
HELDOUT_KIND: SplitKind = "family"
BackendName = Annotated[str, Meta(extra={"door": BACKENDS})]


Rules = Literal["strict", "open"]
Outputs = Literal["fresh", "kept"]
OUTPUTS: Mapping[Rules, Outputs] = {"strict": "fresh", "open": "kept"}
"""What these rules want where nothing is said of outputs."""


class CompileFarm(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are compiled."""

    slots: AtLeastOne | None = None
    """Compilations that one farm process runs at once; null: 1.1 × its cores, rounded up."""
    store_max_bytes: AtLeastOne = 512 * 2**20
    """Size limit of the artifact store; the least recently used artifacts go first."""
    deadline_s: Positive = 20.0
    """Wall clock that one candidate's compilation may take."""
    tuning_s: Positive = 60.0
    """Wall clock, beside deadline_s, for the configurations of an autotuned kernel; those left then are not tried."""
    nice: Annotated[int, Meta(ge=0, le=19)] = 19
    """Scheduling priority of the compiler; 19 is the lowest, so that it disturbs timing least."""
    march: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._+-]*$")] = "native"
    """gcc's name of the processors that C kernels are for; benches on older ones than the farms': such as x86-64-v3."""
    arch: Annotated[str, Meta(pattern=r"^sm_\d{2,3}[af]?$")] = "sm_90"
    """Architecture of the benches' GPUs that GPU kernels are compiled for, such as sm_80."""
    rules: Rules = "strict"
    """What a candidate may hold: strict, what its prompt asks for; open, any Python that runs confined."""


class TimingBench(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are proven correct and timed."""

    core: Count | None = None
    """Core that timing is pinned to; null: the bench core of the CPU layout."""
    min_pairs: AtLeastOne = 8
    """Pairs before sampling may stop but for what is clearly slower or, on a GPU, faster."""
    max_pairs: AtLeastOne = 30
    """Pairs after which sampling stops however wide the interval still is."""
    cap_s: Positive = 0.1
    """Wall clock after which the timing of one candidate stops."""
    check_s: NonNegative = 0.02
    """Seconds of calls, and three sets, after which a clearly slower kernel sees no more sets; 0: all see all."""
    outputs: Outputs = "fresh"
    """fresh: each call's result lies in memory of its own; kept: it only has to hold until the next call."""
    timed_workloads: Count = 0
    """So many workloads of a problem are timed, a secret choice for each kernel; 0: all. All are checked."""
    timed: bool = True
    """Time correct kernels; false: they are only proven correct, for rewards without a part for speed."""
    deadline_s: Positive = 2.0
    """Wall clock that one candidate may take to start, and again for its calls; on a GPU at least 15."""
    shares_with: list[Literal["sampler", "learner", "timing_bench"]] = msgspec.field(default_factory=list)
    """Who is on the same GPU (or cores) and stands still while a bench times; timing_bench: benches take turns."""
    per_gpu: AtLeastOne = 1
    """placement=split: benches on one GPU; above 1 they take turns, which shares_with=[timing_bench] says."""
    clocks: Literal["observe", "lock"] = "observe"
    """GPU clocks: observe records them, lock holds a sustainable one while the run lasts (needs the right to)."""
    baselines: list[Literal["compile", "compile-max-autotune"]] = msgspec.field(default_factory=list)
    """What correct kernels are compared with besides eager: the reference, compiled ahead by Inductor."""
    likely_first: list[str] = msgspec.field(default_factory=list)
    """Runs that teach what is likely to be right, which a bench then takes first; it decides and pays nothing."""
    sanitize_share: Fraction = 0.0
    """Share of correct kernels that run under sanitizers too, a second each; above 0 every new best kernel does."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Of the device's memory, what a bench plans with; benches that take turns share it. More is refused, in bytes."""
    flush_bytes: Count = 0
    """Memory streamed through before each call so that caches are cold; 0: twice the core's L2."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where kernels run; auto: on a GPU where the backend has use for one. Bench 0 takes the first GPU, and so on."""
