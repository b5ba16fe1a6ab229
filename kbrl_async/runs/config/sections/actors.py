"""What each kind of process does, how many there are, on which cores, and where they meet."""

from __future__ import annotations

import msgspec

from kbrl_async.runs.config.ranges import AtLeastOne, Cores, Fraction, Positive


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
