"""What every service process begins with: its run, its configuration, its log, its cores, its name.

::

    service = Service.start("sampler")          # in main(), after the nanny has chosen the run
    Worker(service.addresses.work, service.worker_id, …)
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kbrl_async.keyring import LOCAL, Keyring, client_keys, peer_of
from kbrl_async.runs.config import SERVICES, Config, Endpoints, agreed
from kbrl_async.runs.config.layout import CpuLayout, available_cores, cpu_layout
from kbrl_async.runs.folder import ensure_run, load_run
from kbrl_async.runs.telemetry import logs
from protocols.auth import Role
from protocols.messages import SHARES, Load, StatusReport
from protocols.sockets import ClientKeys
from services.runtime.addresses import addresses
from services.runtime.meters import LoadMeter
from services.runtime.placing import held_gpus, place
from services.runtime.quiet import shared_resources
from services.runtime.usage import GpuMeter

if TYPE_CHECKING:
    from kbrl_async.runs.telemetry.prometheus import Exporter


def choose_run() -> None:
    """Fixes the run in the nanny, so that a child that is started after the run has ended opens no new one."""
    run_dir = ensure_run().resolve()
    os.environ["KBRL_RUN_DIR"] = str(run_dir)
    place(load_run(run_dir))


def leave_out_traces(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the C++ side of torch log errors only, unless somebody has said otherwise: where another process of a group
    dies, each of its warnings is a stack of C++, and exceptions say the cause in a line. Before torch is imported."""
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


ROLES = {
    "sampler": Role.SAMPLER,
    "compile_farm": Role.COMPILE,
    "timing_bench": Role.BENCH,
    "verifier": Role.VERIFIER,
    "learner": Role.LEARNER,
    "reward_aggregator": Role.AGGREGATOR,
}
"""What kind of key each service needs where the queues are open to other hosts."""
KEYS = "KBRL_KEYS"
"""Variable with the folder of a worker's own key, set by `kbrl worker --keys`."""
APART = "KBRL_WORKER_APART"


def credentials(name: str, config: Config, environment: Mapping[str, str]) -> tuple[ClientKeys | None, str]:
    """Keys of a service and their name, with which its worker id must begin; None and "" where it needs none.

    :raises UserError: the key is missing, open to others, or of another role.
    """
    if folder := environment.get(KEYS):
        return client_keys(folder), peer_of(folder).name
    if config.broker.keys and name in ROLES:
        return Keyring(config.broker.keys).local(ROLES[name]), LOCAL
    return None, ""


class Stopped(Exception):  # noqa: N818 - what has happened, not what is wrong
    """The run has stopped before there was a policy."""


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
    keys: ClientKeys | None = None
    """What the broker knows this process by; None where its addresses are of this host only."""
    facts: dict[str, float] = msgspec.field(default_factory=dict)
    """A few figures of this process that travel with its heartbeats; see `tell`."""
    scalars: dict[str, float] = msgspec.field(default_factory=dict)
    """All of them, for Prometheus."""

    @classmethod
    def start(cls, name: str, environment: Mapping[str, str] = os.environ) -> Service:
        """Reads `KBRL_RUN_DIR` (set by the nanny) and opens the log. Raises `ConfigError`."""
        run_dir = Path(environment["KBRL_RUN_DIR"])
        config = load_run(run_dir)
        worker_id = environment.get("HONCHO_PROCESS_NAME") or f"{name}.{socket.gethostname()}.{os.getppid()}"
        logs.configure(worker_id, run_dir, config.log_level)
        layout = cpu_layout(config, available_cores())
        keys, key_name = credentials(name, config, environment)
        if key_name:
            worker_id = f"{key_name}.{worker_id}"
        return cls(name, worker_id, run_dir, config, addresses(run_dir, config), layout, logs.get_logger(), keys)

    @property
    def is_apart(self) -> bool:
        """It shares no disk with the broker: artifacts travel (`kbrl worker`)."""
        return APART in os.environ

    def differs(self, settings: str) -> list[str]:
        """In what this process is not as the broker's run wants its workers."""
        return agreed.differences(self.config, self.name, settings)

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

    def tell(self, facts: Mapping[str, float], scalars: Mapping[str, float] | None = None) -> None:
        """What viewers shall see of this process from now on, in place of what they saw."""
        for held, new in ((self.facts, facts), (self.scalars, scalars or {})):
            for name in [name for name in held if name not in new]:
                del held[name]
            held.update(new)

    def watch(self, meter: LoadMeter) -> None:
        """Let viewers see what `meter` measures and what this process tells. For workers, once."""
        meter.facts = self.facts
        meter.gpu = GpuMeter(held_gpus(self.config, self.name))
        self.export(lambda: meter.last)

    def export(
        self, load: Callable[[], Load], status: Callable[[], StatusReport | None] = lambda: None
    ) -> Exporter | None:
        """Serve Prometheus until the process ends, if the run says so. A port that can't be had stops nothing."""
        settings = self.config.metrics
        if settings.prometheus_port is None:
            return None
        from kbrl_async.runs.telemetry import prometheus  # not needed by most runs

        kind = SERVICES.index(self.name) if self.name in SERVICES else len(SERVICES)
        try:
            exporter = prometheus.Exporter(
                prometheus.MetricsSource(load, status, lambda: self.scalars),
                run_dir=self.run_dir,
                process=self.worker_id,
                host=settings.prometheus_host,
                port=prometheus.port_of(settings.prometheus_port, kind, self.instance),
                labels={"run": self.run_dir.name, "service": self.name},
            )
        except OSError as error:
            self.log.warning("no Prometheus endpoint", cause=str(error), cure="set metrics.prometheus_host")
            return None
        atexit.register(exporter.close)
        self.log.info("metrics", port=exporter.port, host=settings.prometheus_host)
        return exporter

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
