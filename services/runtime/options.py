"""What a service process is told at its start."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from kbrl_async.errors import ConfigError


class RunOptions(msgspec.Struct, frozen=True):
    run_dir: str


def load_run(environment: Mapping[str, str] = os.environ) -> RunOptions:
    """The run that this process belongs to, from `KBRL_RUN_DIR`. Raises `ConfigError`."""
    run_dir = environment.get("KBRL_RUN_DIR", "")
    if not run_dir:
        raise ConfigError("KBRL_RUN_DIR is not set", "Start services with `kbrl train`, or set it to the run directory")
    return RunOptions(run_dir)
