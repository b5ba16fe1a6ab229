"""What is kept and shown of a run, and what an evaluation measures."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.runs.config.ranges import AtLeastOne, Count


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


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What monitoring systems may fetch or are sent: see docs/watching.md. All off by default."""

    prometheus_port: Annotated[int, Meta(ge=0, le=65000)] | None = None
    """First port: every process serves /metrics on one of its own from there on; 0: any free ones; null: none."""
    prometheus_host: str = "127.0.0.1"
    """Address that these ports are bound to. Nothing is encrypted: other hosts only on a network that you trust."""
    otlp_endpoint: str | None = None
    """Traces of rollouts go here by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; null: none are made."""
