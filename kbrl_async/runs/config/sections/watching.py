"""What is kept and shown of a run, and what an evaluation measures."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.runs.config.ranges import AtLeastOne, Count, NonNegative, Positive


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of every scored turn in runs/NAME/rollouts.sqlite, for inspect, replay and the report."""

    keep: Literal["all", "best", "none"] = "all"
    """Whole records of all turns, or of each problem's fastest kernels only (columns of all), or nothing."""
    max_bytes: Count = 4 * 2**30
    """Size limit of the stored records, compressed; the oldest go first and their columns stay. 0: no limit."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What 'kbrl eval' measures; a training run looks at none of it."""

    policy: str | None = None
    """What is evaluated, as 'kbrl eval' found it; null: this is no evaluation."""
    samples: AtLeastOne = 4
    """Answers per problem."""
    temperature: NonNegative | None = None
    """Sampling temperature; 0: greedy, null: that of training."""
    ids: list[str] = msgspec.field(default_factory=list)
    """Problems by id, such as L1/13_softmax or 1/13; empty: all of the levels."""
    split: Literal["all", "heldout", "train"] = "all"
    """Which of these problems: all, those that training never sees, or the others."""
    deadline_s: Positive = 900.0
    """Seconds that all samples of one problem may take together; what is missing then counts as wrong."""
    in_flight: AtLeastOne = 64
    """Samples under way at once."""
    tensorboard_log_dir: str | None = None
    """Folder of event files that the figures are added to; null: that of the evaluation itself."""
    tensorboard_step: Count | None = None
    """Step that the figures stand at; null: the policy's version."""


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


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What monitoring systems may fetch or are sent: see docs/watching.md. All off by default."""

    prometheus_port: Annotated[int, Meta(ge=0, le=65000)] | None = None
    """First port: every process serves /metrics on one of its own from there on; 0: any free ones; null: none."""
    prometheus_host: str = "127.0.0.1"
    """Address that these ports are bound to. Nothing is encrypted: other hosts only on a network that you trust."""
    otlp_endpoint: str | None = None
    """Traces of rollouts go here by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; null: none are made."""
