"""What every service process begins with: its run, its configuration, its log, its cores, its name.

::

    service = Service.start("sampler")          # in main(), after the nanny has chosen the run
    Worker(service.addresses.work, service.worker_id, …)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.config import Config, Endpoints, ensure_run, load_run
from kbrl_async.config.layout import CpuLayout, available_cores, cpu_layout
from kbrl_async.telemetry import logs
from protocols.messages import SHARES
from services.runtime.addresses import addresses
from services.runtime.quiet import shared_resources


def choose_run() -> None:
    """Fixes the run in the nanny, so that a child that is started after the run has ended opens no new one."""
    os.environ["KBRL_RUN_DIR"] = str(ensure_run().resolve())


class Service(msgspec.Struct, frozen=True):
    """The frame of one service process."""

    name: str
    worker_id: str
    """Stable over restarts of the process: the runner's instance name, such as `compile_farm.2`."""
    run_dir: Path
    config: Config
    addresses: Endpoints
    layout: CpuLayout
    log: Any

    @classmethod
    def start(cls, name: str, environment: Mapping[str, str] = os.environ) -> Service:
        """Reads `KBRL_RUN_DIR` (set by the nanny) and opens the log. Raises `ConfigError`."""
        run_dir = Path(environment["KBRL_RUN_DIR"])
        config = load_run(run_dir)
        worker_id = environment.get("HONCHO_PROCESS_NAME") or f"{name}.{socket.gethostname()}.{os.getppid()}"
        logs.configure(worker_id, run_dir, config.log_level)
        layout = cpu_layout(config, available_cores())
        return cls(name, worker_id, run_dir, config, addresses(run_dir, config), layout, logs.get_logger())

    @property
    def instance(self) -> int:
        """0 for the first process of its kind on this host."""
        suffix = self.worker_id.rpartition(".")[2]
        return max(0, int(suffix) - 1) if suffix.isdigit() and len(suffix) < 4 else 0

    @property
    def policies(self) -> Path:
        return self.run_dir / "policies"

    @property
    def artifacts(self) -> Path:
        return self.run_dir / "artifacts"

    def quiet_caps(self) -> dict[str, str]:
        """Caps of a process that stands still when a bench asks: what it shares with the benches, if anything."""
        if self.name not in self.config.timing_bench.shares_with:
            return {}
        return {SHARES: ",".join(shared_resources(self.device))}

    def pin(self, cores: list[int]) -> None:
        """Binds this process, and what it starts, to `cores`."""
        if cores:
            os.sched_setaffinity(0, cores)

    @property
    def device(self) -> str:
        """Where this process computes; `auto` is the GPU where there is one. Imports torch."""
        if self.config.device != "auto":
            return self.config.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
