"""Which cores a bench and its children get."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kbrl_async.runs.config import load
from kbrl_async.runs.config.layout import cpu_layout
from services.runtime.service import Service
from services.timing_bench import place
from services.timing_bench.place import Place

CORES = list(range(12))


def cores_of(
    words: str, instance: int, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "timing_bench"
) -> Any:
    config = load(overrides=["processes.timing_bench=2", *words.split()])
    monkeypatch.setattr(place, "bench_device", lambda *_, **__: device)
    monkeypatch.setattr(place, "hardware_of", lambda _: "one")
    layout = cpu_layout(config, CORES)
    service = SimpleNamespace(config=config, layout=layout, name=name, instance=instance, run_dir=tmp_path)
    return Place.of(cast(Service, service)).cores


@pytest.mark.parametrize(
    ("words", "device", "is_apart", "share"),
    [
        ("sampler.memory_share=.3 learner.memory_gb=40", "cuda:0", False, 0.45 - 5 * 2**30 / (200 * 10**9)),
        ("sampler.memory_share=.3 learner.memory_gb=40 timing_bench.memory_share=.4", "cuda:0", False, 0.4),
        ("sampler.memory_share=.3 learner.memory_gb=40", "cuda:0", True, 1.0),
        ("sampler.memory_share=.3 learner.memory_gb=40", "cpu", False, 1.0),
        ("sampler.memory_share=.3 processes.timing_bench=2 timing_bench.shares_with=[timing_bench]", "cpu", False, 0.5),
        ("processes.verifier=2", "cpu", False, 1.0),
    ],
)
def test_a_bench_plans_with_what_the_policy_of_its_own_gpu_leaves(
    words: str, device: str, is_apart: bool, share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(place, "bench_device", lambda *_, **__: device)
    monkeypatch.setattr(place, "hardware_of", lambda _: "one")
    on_gpu = SimpleNamespace(total_memory=200 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {torch.device("cuda:0"): on_gpu}.__getitem__)
    words += " placement=one_gpu sampler.engine=vllm model_name=./of-seven-billion backend=cuda-nvrtc"
    config = load(overrides=words.split())
    layout = cpu_layout(config, CORES)
    service = SimpleNamespace(
        config=config, layout=layout, name="timing_bench", instance=0, run_dir=tmp_path, is_apart=is_apart
    )
    found = Place.of(cast(Service, service)).options(cast(Service, service))
    assert found.memory_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("words", "device", "cores"),
    [
        ("", "cuda:0", [(10,), (11,)]),
        ("", "cpu", [(10,), (11,)]),
        ("backend=cuda-nvrtc", "cuda:0", [(6, 8, 10), (7, 9, 11)]),
        ("cpu.bench=[7,8,9,10,11]", "cuda:0", [(7, 9, 11), (8, 10)]),
        ("cpu.bench=[7,8,9,10,11]", "cpu", [(7,), (8,)]),
    ],
)
def test_a_bench_on_a_gpu_has_its_part_of_the_cores_that_are_listed(
    words: str, device: str, cores: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [cores_of(words, number, device, monkeypatch, tmp_path) for number in (0, 1)] == cores


def test_verifiers_on_a_gpu_have_a_few_of_the_compilers_cores_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of(number: int, device: str) -> Any:
        return cores_of("backend=cuda-nvrtc", number, device, monkeypatch, tmp_path, "verifier")

    assert [of(number, "cuda:0") for number in (0, 1)] == [(1, 2, 3, 4), (1, 2, 3, 5)]
    assert of(1, "cpu") == (2,)
