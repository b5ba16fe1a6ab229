"""Where a bench or a verifier works, and whom it shares that with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.kernels.timing import Recipe, resolution
from kbrl_async.kernels.timing.device import hardware_of
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import BenchOptions, bench_options
from kbrl_async.kernels.verify.options import ALONE_SHARE
from kbrl_async.runs.config.layout import GPU_BENCH_CORES
from services.runtime.capabilities import bench_device, memory_share, share_beside_policy
from services.runtime.quiet import shared_resources
from services.runtime.service import Service


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process: its cores and its device."""

    is_verifier: bool
    is_behind: bool
    """A bench that times what verifiers have proven."""
    cores: tuple[int, ...]
    """Of itself and its children: one; on a GPU a bench's part of those that benches have, a few of a verifier's, which
    compilers have, too."""
    device: str
    hardware: str
    turns: DeviceTurns | None
    """With the other benches and verifiers of this device; None where there are none."""
    resource: str
    """The device as quiet windows name it."""
    asks_for_quiet: bool
    """Samplers or learners are on it."""
    cache: Path
    """Of what was found out about this host."""

    @classmethod
    def of(cls, service: Service) -> Place:
        """:raises MissingTool: the run needs a GPU and this host has none."""
        settings, counts = service.config.timing_bench, service.config.processes
        is_verifier = service.name == "verifier"
        cores = service.layout.compile if is_verifier else service.layout.bench
        is_behind = counts.verifier > 0 and not is_verifier
        device = bench_device(settings.device, service.config.backend, service.instance, from_last=is_behind)
        resource = shared_resources(device)[0]
        own = _own_cores(service, cores, is_on_gpu=device != "cpu")
        turns = None
        if "timing_bench" in settings.shares_with or (counts.verifier and device != "cpu"):
            turns = DeviceTurns(service.run_dir / "locks" / resource.replace("/", "-"))
        return cls(
            is_verifier=is_verifier,
            is_behind=is_behind,
            cores=tuple(own),
            device=device,
            hardware=hardware_of(device),
            turns=turns,
            resource=resource,
            asks_for_quiet=not is_verifier and bool(set(settings.shares_with) - {"timing_bench"}),
            cache=resolution.cache_folder(service.config.cache_path),
        )

    def options(self, service: Service) -> BenchOptions:
        """How a bench of this run verifies and times here."""
        settings = service.config.timing_bench
        options = bench_options(
            settings,
            self.device,
            self.cores,
            recipe=Recipe.of(settings, resolved=resolution.for_run(self.cache, service.run_dir, self.hardware)),
            memory_share=self._memory_share(service),
            alone_share=ALONE_SHARE,
            is_light=self.is_behind,
        )
        beside = self._share_beside_policy(service)
        return options if beside is None else msgspec.structs.replace(options, memory_share=beside)

    def _memory_share(self, service: Service) -> float:
        if self.turns is None:
            return 1.0
        return memory_share(service.config, service.name, None if self.device == "cpu" else self._memory)

    def _share_beside_policy(self, service: Service) -> float | None:
        if self.device == "cpu" or service.is_apart:
            return None
        return share_beside_policy(service.config, service.name, service.instance, self._memory)

    @property
    def _memory(self) -> int:
        """Bytes of its GPU."""
        import torch

        return int(torch.cuda.get_device_properties(torch.device(self.device)).total_memory)


def _own_cores(service: Service, cores: Sequence[int], *, is_on_gpu: bool) -> Sequence[int]:
    number, benches = service.instance, service.config.processes.timing_bench
    if is_on_gpu and service.name == "verifier":
        begin = number * GPU_BENCH_CORES
        return sorted({cores[place % len(cores)] for place in range(begin, begin + GPU_BENCH_CORES)})
    several = is_on_gpu and number < benches <= len(cores)
    return cores[number::benches] if several else [cores[number % len(cores)]]
