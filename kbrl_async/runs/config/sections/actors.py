"""What each kind of process does, how many there are, on which cores, and where they meet."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.runs.config.ranges import AtLeastOne, Cores, Count, Fraction, Positive


class CompileFarm(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are compiled."""

    slots: AtLeastOne | None = None
    """Compilations that one farm process runs at once; null: 1.1 × its cores, rounded up."""
    store_max_bytes: AtLeastOne = 512 * 2**20
    """Size limit of the artifact store; the least recently used artifacts go first."""
    deadline_s: Positive = 20.0
    """Wall clock that one candidate's compilation may take."""
    nice: Annotated[int, Meta(ge=0, le=19)] = 19
    """Scheduling priority of the compiler; 19 is the lowest, so that it disturbs timing least."""
    march: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._+-]*$")] = "native"
    """gcc's name of the processors that C kernels are for; benches on older ones than the farms': such as x86-64-v3."""


class TimingBench(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are proven correct and timed."""

    core: Count | None = None
    """Core that timing is pinned to; null: the bench core of the CPU layout."""
    min_pairs: AtLeastOne = 8
    """Pairs of candidate and reference measured before sampling may stop."""
    max_pairs: AtLeastOne = 30
    """Pairs after which sampling stops however wide the interval still is."""
    cap_s: Positive = 0.1
    """Wall clock after which the timing of one candidate stops."""
    timed: bool = True
    """Time correct kernels; false: they are only proven correct, for rewards without a part for speed."""
    deadline_s: Positive = 2.0
    """Wall clock that one candidate may take in all; endless loops are killed after it."""
    shares_with: list[Literal["sampler", "learner", "timing_bench"]] = msgspec.field(default_factory=list)
    """Who is on the same GPU (or cores) and stands still while a bench times; timing_bench: benches take turns."""
    clocks: Literal["observe", "lock"] = "observe"
    """GPU clocks: observe records them, lock holds a sustainable one while the run lasts (needs the right to)."""
    baselines: list[Literal["compile", "compile-max-autotune"]] = msgspec.field(default_factory=list)
    """What correct kernels are compared with besides eager: the reference, compiled ahead by Inductor."""
    sanitize_share: Fraction = 0.0
    """Share of correct kernels that run under sanitizers too, a second each; above 0 every new best kernel does."""
    flush_bytes: Count = 0
    """Memory streamed through before each call so that caches are cold; 0: twice the core's L2."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where kernels run; auto: on a GPU where the backend has use for one. Bench 0 takes the first GPU, and so on."""


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """Where the queues are reached, and how long a silent worker is believed."""

    submit: str | None = None
    """Address for producers, such as tcp://127.0.0.1:5755; null: a socket file of the run."""
    work: str | None = None
    """Address for workers, such as tcp://127.0.0.1:5756; null: a socket file of the run."""
    status: str | None = None
    """Address for viewers (kbrl top), who can change nothing; null: a socket file of the run."""
    allow_remote: bool = False
    """Allow addresses that other hosts can reach; needs broker.keys."""
    check_share: Fraction = 0.0
    """Share of candidates that a second farm and bench do too, of another key; who stands alone is quarantined."""
    keys: str | None = None
    """Folder of keys made by 'kbrl keys new': TCP traffic is encrypted, and only keys on its allow-list are let in."""
    heartbeat_s: Positive = 1.0
    """Seconds between two heartbeats of a worker; three missed ones make it suspect."""
    lease_generate_s: Positive = 60.0
    """Seconds after the last heartbeat until a generation is given to another worker."""
    lease_compile_s: Positive = 60.0
    """The same for a compilation."""
    lease_bench_s: Positive = 30.0
    """The same for verifying and timing."""
    lease_score_s: Positive = 30.0
    """The same for scoring."""
    lease_train_s: Positive = 120.0
    """The same for a batch at the learner."""
    lease_trained_s: Positive = 30.0
    """The same for closing a trained batch."""

    @property
    def leases(self) -> dict[str, float]:
        """Lease seconds by stage."""
        prefix, suffix = "lease_", "_s"
        names = [n for n in self.__struct_fields__ if n.startswith(prefix)]
        return {n.removeprefix(prefix).removesuffix(suffix): float(getattr(self, n)) for n in names}


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Which cores each kind of process may use. See docs/design.md, 'CPU layout'."""

    sampler: Cores = "auto"
    """Cores of the samplers; auto: all but the bench's."""
    learner: Cores = "auto"
    """Cores of the learner; auto: all but the bench's."""
    bench: Cores = "auto"
    """Cores of the timing benches, one each; auto: the last ones."""
    compile: Cores = "auto"
    """Cores of the compile farm; auto: all but the first and the bench's, or the first where there is no other."""


class Processes(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes of each kind `kbrl train` starts on this host."""

    sampler: AtLeastOne = 1
    """Samplers."""
    compile_farm: AtLeastOne = 1
    """Compile farms."""
    timing_bench: AtLeastOne = 1
    """Timing benches; each needs a core (or a GPU) of its own."""
