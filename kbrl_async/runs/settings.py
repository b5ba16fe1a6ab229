"""What can be set of a run as a whole: its processes and where they meet, what is kept and shown, demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.errors import ConfigError
from kbrl_async.ranges import AtLeastOne, Count, Fraction, Positive

Cores = Literal["auto"] | list[Count]


class Demonstrations(msgspec.Struct, frozen=True, kw_only=True):
    """What method=sft learns from."""

    files: list[str] = msgspec.field(default_factory=list)
    """JSONL, JSON, Parquet files, folders of them, runs, evidence of kbrl optimize; empty: the own corpus's answers."""
    keep: AtLeastOne = 3
    """Run folders: best different verified answers of each problem that are taken."""
    include_eval: bool = False
    """Run folders: take right answers of evaluations too; what is held out is then learned, and says nothing later."""
    examples: AtLeastOne = 4096
    """Without files: pairs of problem and right answer that the corpus holds."""


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
    lease_verify_s: Positive = 30.0
    """The same for verifying, where there are verifiers."""
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
    """Cores of the timing benches, on a GPU several each; auto: the last, one each, on a GPU four but at most half."""
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
    verifier: Count = 0
    """Verifiers, which prove candidates right, so that benches only time what is; 0: benches do both."""


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of every scored turn in runs/NAME/rollouts.sqlite, for inspect, replay and the report."""

    keep: Literal["all", "best", "none"] = "all"
    """Whole records of all turns, or of each problem's fastest kernels only (columns of all), or nothing."""
    max_bytes: Count = 4 * 2**30
    """Size limit of the stored records, compressed; the oldest go first and their columns stay. 0: no limit."""


class Tensorboard(msgspec.Struct, frozen=True, kw_only=True):
    """What is written for TensorBoard."""

    enabled: bool = True
    """Write event files under runs/NAME/tensorboard."""
    histograms_every: AtLeastOne = 5
    """Updates between two histograms of rewards, speedups and advantages."""
    per_level: bool = True
    """Also break rewards and rates down by problem level."""
    log_dir: str | None = None
    """Folder that collects the event files of several runs, each in a folder of its name; null: runs/NAME."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine costs, for 'kbrl plan'."""

    prices: list[str] = msgspec.field(default_factory=list)
    """Prices of an hour, such as H100=2.49,gpu=1.5,core=0.04: by a part of a GPU's name, of any other, of a core."""
    currency: str = ""
    """Written behind sums, such as EUR."""


def prices_of(table: Sequence[str]) -> dict[str, float]:
    """By name.

    :raises ConfigError: an entry that is no NAME=PRICE.
    """
    found: dict[str, float] = {}
    for entry in table:
        name, _, price = entry.partition("=")
        try:
            found[name.strip()] = float(price)
        except ValueError:
            found[name.strip()] = -1.0
        if not name.strip() or not 0 <= found[name.strip()] < float("inf"):
            raise ConfigError(f"cost.prices: {entry!r} is no price", "Write NAME=PRICE of an hour, such as H100=2.49")
    return found


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What monitoring systems may fetch or are sent: see docs/watching.md. All off by default."""

    prometheus_port: Annotated[int, Meta(ge=0, le=65000)] | None = None
    """First port: every process serves /metrics on one of its own from there on; 0: any free ones; null: none."""
    prometheus_host: str = "127.0.0.1"
    """Address that these ports are bound to. Nothing is encrypted: other hosts only on a network that you trust."""
    wandb_project: str | None = None
    """Figures go to this project of Weights & Biases, too; WANDB_API_KEY or WANDB_MODE=offline. null: no."""
    mlflow_uri: str | None = None
    """Figures go to this MLflow server, too, such as http://127.0.0.1:5000 or sqlite:///mlflow.db; null: no."""
    otlp_endpoint: str | None = None
    """Traces of rollouts go here by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; null: none are made."""
