"""What a process uses of processors and GPUs, and what it tells viewers."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import Config, load
from kbrl_async.runs.config.layout import CpuLayout, endpoints
from kbrl_async.runs.config.placement import Gpu
from services.runtime.meters import MAX_FACTS, LoadMeter
from services.runtime.placing import held_gpus
from services.runtime.service import Service
from services.runtime.usage import NO_GPU, CpuMeter, GpuMeter, cpu_seconds
from tests.unit.services.log import Log


def proc(folder: Path, tree: dict[int, tuple[str, list[int]]]) -> Path:
    """A /proc of these processes: pid → the line of its `stat` behind the name, and its children."""
    for pid, (line, children) in tree.items():
        thread = folder / str(pid) / "task" / str(pid)
        thread.mkdir(parents=True)
        (folder / str(pid) / "stat").write_text(f"{pid} (a name) with (parts) {line}")
        (thread / "children").write_text(" ".join(map(str, children)))
    return folder


def ticks(*used: int) -> str:
    """`stat` behind the name: state, ten fields, then utime, stime, cutime, cstime."""
    return " ".join(["S", *["0"] * 10, *map(str, used), "0"])


def test_cpu_time_is_that_of_the_whole_tree(tmp_path: Path) -> None:
    folder = proc(
        tmp_path, {1: (ticks(100, 0, 0, 0), [2, 3]), 2: (ticks(0, 50, 25, 0), [4]), 4: (ticks(0, 0, 0, 25), [])}
    )
    assert cpu_seconds(1, folder) == 200 / os.sysconf("SC_CLK_TCK"), "process 3 has just gone"


def test_cpu_time_of_this_process_is_about_what_the_system_says() -> None:
    before = cpu_seconds(os.getpid())
    sum(n * n for n in range(300_000))
    assert cpu_seconds(os.getpid()) >= before > 0
    assert cpu_seconds(2**22 + 1) == 0.0


def test_cores_are_the_time_used_in_the_time_that_passed_and_never_negative() -> None:
    clock, used = iter([0.0, 2.0, 4.0, 4.0]), iter([10.0, 13.0, 12.0, 12.0])
    meter = CpuMeter(lambda: next(clock), lambda: next(used))
    assert [meter.take() for _ in range(3)] == [1.5, 0.0, 0.0]


class NVMLError(Exception):
    pass


def library(**more: Any) -> Any:
    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=75),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * 2**20),
    }
    return SimpleNamespace(**calls | more)


def test_a_gpu_is_read_by_its_own_name() -> None:
    assert GpuMeter(["GPU-1"], library()).take() == (0.75, 3.0)


def test_of_several_gpus_the_mean_and_the_fullest_count() -> None:
    """A sampler of two GPUs, or a learner of two ranks, has only one process that tells."""
    used = {"GPU-1": (20, 3), "GPU-2": (60, 9)}
    both = library(
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=used[handle][0]),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used[handle][1] * 2**20),
    )
    assert GpuMeter(list(used), both).take() == (0.4, 9.0)


@pytest.mark.parametrize(
    ("service", "words", "expected"),
    [
        ("sampler", "device=cuda sampler.engine=vllm", ["GPU-0"]),
        ("sampler", "device=cuda sampler.engine=vllm placement=split sampler.tensor_parallel=2", ["GPU-0", "GPU-1"]),
        ("sampler", "device=cuda sampler.engine=transformers", []),  # torch knows
        ("sampler", "device=cpu sampler.engine=vllm", []),
        ("learner", "device=cuda placement=split learner.processes=2 learner.shard=true", ["GPU-0", "GPU-1"]),
        ("learner", "device=cuda", []),
        ("timing_bench", "device=cuda", []),
    ],
)
def test_who_computes_in_other_processes_is_told_its_gpus(service: str, words: str, expected: list[str]) -> None:
    """vLLM's engine is one: a rehearsal's sampler had a GPU of which nobody said how busy it was."""
    gpus = [Gpu(str(n), "H200", 140.0, f"GPU-{n}") for n in range(3)]
    config = load(overrides=["model_name=Qwen3-8B", *words.split()])
    assert held_gpus(config, service, {}, lambda _: gpus) == expected


def test_without_a_gpu_or_where_the_library_fails_there_is_none_and_nothing_breaks() -> None:
    asked: list[str] = []

    def fails(uuid: str) -> None:
        asked.append(uuid)
        raise NVMLError("Driver Not Loaded")

    assert GpuMeter().take() == NO_GPU
    broken = GpuMeter(["GPU-1"], library(nvmlDeviceGetHandleByUUID=fails))
    assert [broken.take(), broken.take()] == [NO_GPU, NO_GPU]
    assert asked == ["GPU-1"], "a library that failed is not asked again"


def test_a_load_has_what_the_process_tells_up_to_a_limit() -> None:
    meter = LoadMeter(lambda: 0.0)
    meter.facts = {str(n): float(n) for n in range(2 * MAX_FACTS)}
    load = meter.take()
    assert len(load.facts) == MAX_FACTS
    assert meter.last == load
    assert load.gpu == -1.0


def service(folder: Path, *overrides: str) -> Service:
    config = load(overrides=overrides) if overrides else Config()
    layout = CpuLayout([0], [0], [0], [0], [0])
    return Service("learner", "learner.1", folder, config, endpoints(config, folder), layout, Log())


def test_what_a_service_tells_replaces_what_it_told_before(tmp_path: Path) -> None:
    told, meter = service(tmp_path), LoadMeter(lambda: 0.0)
    told.watch(meter)
    told.tell({"reward_mean": 0.5, "speedup_mean": 2.0}, {"reward/mean": 0.5})
    told.tell({"reward_mean": 0.75})
    assert meter.take().facts == {"reward_mean": 0.75}
    assert told.scalars == {}


def test_no_port_is_opened_unless_the_run_says_so(tmp_path: Path) -> None:
    assert service(tmp_path).export(lambda: LoadMeter(lambda: 0.0).last) is None
    assert not (tmp_path / "metrics").exists()


def test_a_service_serves_its_load_and_all_it_tells_on_loopback(tmp_path: Path) -> None:
    told, meter = service(tmp_path, "metrics.prometheus_port=0"), LoadMeter(lambda: 0.0)
    exporter = told.export(lambda: meter.last)
    assert exporter is not None
    told.tell({}, {"reward/mean": 0.5})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=20) as answer:
            assert "kbrl_reward_mean 0.5" in answer.read().decode()
    finally:
        exporter.close()


def test_a_host_that_is_not_ours_costs_the_endpoint_and_not_the_run(tmp_path: Path) -> None:
    told = service(tmp_path, "metrics.prometheus_port=0", "metrics.prometheus_host=192.0.2.1")
    assert told.export(lambda: LoadMeter(lambda: 0.0).last) is None
    assert [line.event for line in told.log.at("warning")] == ["no Prometheus endpoint"]


@pytest.mark.parametrize("value", ["-1", "70000", "many"])
def test_a_port_that_can_not_be_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="prometheus_port"):
        load(overrides=[f"metrics.prometheus_port={value}"])
