"""What services say of themselves: backends that they can do, resources that they share, how code is confined."""

from __future__ import annotations

import pytest
import torch

from kbrl_async.kernels.backends import backend, backends
from kbrl_async.kernels.sandbox import Isolation
from kbrl_async.kernels.verify.reservations import even_share
from kbrl_async.runs.config import load
from protocols.messages import BACKENDS
from protocols.quiet import resources_of
from services.runtime import capabilities
from services.runtime.capabilities import bench_device, farm_caps, log_fields, memory_share, share_beside_policy
from services.runtime.quiet import shared_resources


def test_a_farm_offers_what_it_can_build_and_says_why_not_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    name = backends()[0]
    monkeypatch.setattr(type(backend(name)), "missing", lambda _: "its compiler is not installed")
    caps, lacking = farm_caps("c")
    assert name not in caps[BACKENDS].split(",")
    assert lacking[name] == "its compiler is not installed"
    assert set(caps[BACKENDS].split(",")) | set(lacking) >= set(backends())


def test_processes_on_one_gpu_name_the_same_resource_and_others_do_not() -> None:
    bench = shared_resources("cuda:1", {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert bench == shared_resources("cuda:1", {})
    assert bench == shared_resources("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})
    sampler = shared_resources("cuda", {"CUDA_VISIBLE_DEVICES": "0,1"})
    learner = shared_resources("cuda", {"CUDA_VISIBLE_DEVICES": "0"})
    assert set(bench) <= set(sampler)
    assert not set(bench) & set(learner)
    assert resources_of({"shares": ",".join(sampler)}) == frozenset(sampler)


TWO, THREE, FOUR = (even_share(80 << 30, count) for count in (2, 3, 4))


@pytest.mark.parametrize(
    ("words", "gpus", "bench", "verifier"),
    [
        ("", 1, 1.0, 1.0),
        ("timing_bench.shares_with=[timing_bench] processes.timing_bench=3", 1, THREE, 1.0),
        ("processes.verifier=2", 1, THREE, THREE),
        ("processes.verifier=2", 2, 1.0, TWO),
        ("processes.verifier=2 placement=one_gpu", 2, THREE, THREE),
        ("processes.verifier=2 placement=two_gpus", 1, 1.0, TWO),
        (
            "placement=split processes.timing_bench=8 timing_bench.per_gpu=4 timing_bench.shares_with=[timing_bench]",
            1,
            FOUR,
            1.0,
        ),
    ],
)
def test_benches_and_verifiers_of_one_gpu_share_its_memory(
    words: str, gpus: int, bench: float, verifier: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = load(overrides=words.split())
    assert [memory_share(config, name, 80 << 30) for name in ("timing_bench", "verifier")] == [bench, verifier]


@pytest.mark.parametrize(
    ("words", "bench", "verifier"),
    [
        ("placement=one_gpu sampler.memory_share=.3 learner.memory_gb=40", 0.4, None),
        ("placement=one_gpu sampler.memory_share=.3 learner.memory_gb=40 processes.timing_bench=2", 0.175, None),
        ("placement=one_gpu sampler.memory_share=.3 learner.memory_gb=40 processes.verifier=1", 0.175, 0.175),
        ("placement=one_gpu sampler.memory_share=.35", 0.15, None),
        ("placement=one_gpu sampler.memory_share=.6 learner.memory_gb=60 processes.timing_bench=2", 0.05, None),
        ("placement=one_gpu sampler.memory_share=.3 learner.memory_gb=40 timing_bench.memory_share=.3", 0.3, None),
        ("placement=one_gpu sampler.memory_share=.3 learner.memory_gb=40 model_name=small", None, None),
        ("placement=one_gpu sampler.engine=transformers learner.memory_gb=40", None, None),
        ("placement=two_gpus sampler.memory_share=.3 learner.memory_gb=40 processes.verifier=1", None, 0.4),
        ("placement=learner_apart sampler.memory_share=.6", 0.3, None),
        ("placement=learner_apart sampler.memory_share=.6 processes.verifier=1", 0.125, 0.125),
        ("placement=split sampler.memory_share=.9 processes.verifier=1", None, None),
        ("placement=split timing_bench.shares_with=[sampler] sampler.memory_share=.6 processes.timing_bench=1 "
         "processes.verifier=1", 0.3, None),
        ("sampler.memory_share=.3 learner.memory_gb=40", None, None),
    ],
)  # fmt: skip
def test_who_verifies_on_the_policys_gpu_plans_with_what_that_leaves_beside_contexts(
    words: str, bench: float | None, verifier: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of 200 GB, of which contexts take 10 GB for each that verifies."""
    monkeypatch.setattr(capabilities, "CONTEXTS_BYTES", 10**10)
    config = load(overrides=["sampler.engine=vllm", "model_name=./of-seven-billion", *words.split()])
    shares = {name: share_beside_policy(config, name, 0, 200 * 10**9) for name in ("timing_bench", "verifier")}
    assert shares["timing_bench"] == pytest.approx(bench)
    if config.processes.verifier:
        assert shares["verifier"] == pytest.approx(verifier)


def test_verifiers_take_gpus_from_the_first_and_benches_behind_them_from_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [bench_device("cuda", "cuda", number) for number in (0, 1, 2)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [bench_device("cuda", "cuda", number, from_last=True) for number in (0, 1)] == ["cuda:1", "cuda:0"]


def test_what_a_host_lacks_for_isolation_is_in_the_first_line_of_the_log() -> None:
    assert log_fields(Isolation("full")) == {"isolation": "full"}
    assert log_fields(Isolation("reduced", ("landlock",))) == {"isolation": "reduced", "missing": ["landlock"]}
