"""Which GPU each process gets, and what a machine must have for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import ConfigError, HostError
from kbrl_async.runs.config import load
from kbrl_async.runs.config.placement import Gpu, allowed, check_fit, misfit, ranges, visible_to
from services.runtime.placing import place

H100 = [Gpu(str(i), "NVIDIA H100", 79.6) for i in range(8)]
CONFIGS = Path(__file__).parents[4] / "configs"
PLACED = ("learner.1", "sampler.1", "sampler.2", "timing_bench.1", "timing_bench.2")
PROCESSES = (*PLACED, "broker", "compile_farm.1", "reward_aggregator.1")


def seen(*words: str, gpus: list[Gpu] = H100) -> dict[str, str]:
    config = load(overrides=words)
    return {name: visible_to(config, name, gpus).get("CUDA_VISIBLE_DEVICES", "as it was") for name in PROCESSES}


def test_without_a_placement_nothing_is_changed() -> None:
    assert set(seen().values()) == {"as it was"}


@pytest.mark.parametrize(
    ("placement", "learner", "sampler", "first", "second"),
    [
        ("one_gpu", "0", "0", "0", "0"),
        ("two_gpus", "0", "0", "1", "1"),
        ("learner_apart", "0", "1", "1", "1"),
        ("split", "0", "1", "2", "3"),
    ],
)
def test_each_process_gets_the_gpu_of_its_preset_and_the_others_none(
    placement: str, learner: str, sampler: str, first: str, second: str
) -> None:
    got = seen(f"placement={placement}")
    names = ("learner.1", "sampler.1", "timing_bench.1", "timing_bench.2")
    assert tuple(got[name] for name in names) == (learner, sampler, first, second)
    assert got["broker"] == got["compile_farm.1"] == got["reward_aggregator.1"] == "as it was"


def test_no_two_processes_of_a_split_share_a_gpu() -> None:
    config = load(overrides=["placement=split", "processes.sampler=4", "processes.timing_bench=3"])
    names = ["learner", *(f"sampler.{i}" for i in range(1, 5)), *(f"timing_bench.{i}" for i in range(1, 4))]
    ids = [visible_to(config, name, H100)["CUDA_VISIBLE_DEVICES"] for name in names]
    assert sorted(ids) == [str(i) for i in range(8)]


def test_benches_of_a_split_may_take_turns_on_each_gpu() -> None:
    words = ["placement=split", "processes.timing_bench=5", "timing_bench.per_gpu=3"]
    config = load(overrides=[*words, "timing_bench.shares_with=[timing_bench]", "processes.verifier=1"])
    found = [visible_to(config, f"timing_bench.{i}", H100)["CUDA_VISIBLE_DEVICES"] for i in range(1, 6)]
    assert found == ["2", "2", "2", "3", "3"]
    assert visible_to(config, "verifier.1", H100)["CUDA_VISIBLE_DEVICES"] == "4"
    assert misfit(config, H100[:5]) == ""
    assert "processes.timing_bench=5 by 3 + 1 for verifiers" in misfit(config, H100[:4])


def test_benches_of_a_split_may_sit_beside_the_samplers() -> None:
    words = ["placement=split", "learner.processes=2", "sampler.engine=vllm", "sampler.tensor_parallel=2"]
    shared = [*words, "processes.timing_bench=1", "timing_bench.shares_with=[sampler]"]
    got = seen(*shared)
    assert (got["learner.1"], got["sampler.1"], got["timing_bench.1"]) == ("0,1", "2,3", "2")
    assert misfit(load(overrides=shared), H100[:4]) == ""
    assert misfit(load(overrides=shared), H100[:3]).startswith(
        "it takes 4 GPUs (learner.processes=2 + processes.sampler=1 × 2 GPUs)"
    )
    two = [*words, "processes.sampler=2", "processes.timing_bench=2", "timing_bench.shares_with=[sampler]"]
    assert (seen(*two)["timing_bench.1"], seen(*two)["timing_bench.2"]) == ("2", "4")
    assert misfit(load(overrides=two), H100[:6]) == ""
    crowded = [*shared, "processes.timing_bench=2"]
    assert "they take turns" in misfit(load(overrides=crowded), H100[:4])


@pytest.mark.parametrize(
    ("placement", "gpu"), [("one_gpu", "0"), ("two_gpus", "0"), ("learner_apart", "1"), ("split", "4")]
)
def test_verifiers_share_a_gpu_on_which_nobody_times_where_there_is_one(placement: str, gpu: str) -> None:
    config = load(
        overrides=[f"placement={placement}", "processes.verifier=3", "timing_bench.shares_with=[timing_bench]"]
    )
    at = {visible_to(config, f"verifier.{number}", H100)["CUDA_VISIBLE_DEVICES"] for number in (1, 2, 3)}
    bench = visible_to(config, "timing_bench.1", H100)["CUDA_VISIBLE_DEVICES"]
    assert at == {gpu}
    assert (bench == gpu) is (placement in ("one_gpu", "learner_apart"))
    assert misfit(config, H100) == ""
    assert ranges(config)["verifier.3"] == gpu
    if placement == "split":
        assert misfit(config, H100[:4]).endswith("+ 1 for verifiers), and this machine has 4")


def test_each_process_of_a_learner_gets_a_gpu_of_its_own_in_a_split() -> None:
    words = ["placement=split", "learner.processes=3", "processes.sampler=2", "processes.timing_bench=2"]
    got = seen(*words)
    assert got["learner.1"] == "0,1,2"
    assert (got["sampler.1"], got["sampler.2"], got["timing_bench.1"]) == ("3", "4", "5")
    assert misfit(load(overrides=words), H100[:7]) == ""
    assert misfit(load(overrides=words), H100[:6]).startswith("it takes 7 GPUs (learner.processes=3 + ")


@pytest.mark.parametrize("placement", ["one_gpu", "two_gpus"])
def test_processes_of_a_learner_never_share_a_gpu(placement: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.processes=2 with placement={placement}.*placement=split"):
        load(overrides=[f"placement={placement}", "learner.processes=2"])
    load(overrides=["learner.processes=2"])


@pytest.mark.parametrize(("placement", "quiet"), [("one_gpu", True), ("two_gpus", False), ("split", False)])
def test_only_a_bench_that_shares_its_gpu_asks_for_quiet(placement: str, quiet: bool) -> None:
    config = load(overrides=[f"placement={placement}"])
    assert (config.timing_bench.shares_with == ["sampler", "learner"]) is quiet
    assert config.device == "cuda"


def test_benches_that_take_turns_may_share_a_gpu() -> None:
    turns = ["processes.timing_bench=2", "timing_bench.shares_with=sampler,learner,timing_bench"]
    config = load(overrides=["placement=one_gpu", *turns])
    assert misfit(config, H100[:1]) == ""
    assert visible_to(config, "timing_bench.2", H100[:1]) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_key_of_ones_own_wins_over_the_preset() -> None:
    assert load(overrides=["placement=split", "sampler.memory_share=0.6"]).sampler.memory_share == 0.6


@pytest.mark.parametrize(
    ("words", "gpus", "why"),
    [
        (["placement=one_gpu"], [], "takes 1 GPU, and this machine has 0"),
        (["placement=two_gpus"], H100[:1], "takes 2 GPUs, and this machine has 1"),
        (
            ["placement=split"],
            H100[:3],
            r"takes 4 GPUs \(learner.processes=1 \+ processes.sampler=1 \+ processes.timing_bench=2\)",
        ),
        (["placement=one_gpu"], [Gpu("0", "Small", 11.0)], "GPU 0 has 11 GiB, and it takes 24"),
        (["placement=one_gpu", "processes.sampler=2"], H100, "several need placement=split"),
        (["placement=two_gpus", "processes.timing_bench=2"], H100, "they take turns where"),
        (["placement=split", "timing_bench.per_gpu=2"], H100, "they take turns where"),
        (
            ["placement=split", "processes.timing_bench=2", "processes.sampler=1"],
            [*H100[:3], Gpu("3", "NVIDIA A100", 80.0)],
            r"different GPUs \(NVIDIA A100, NVIDIA H100\)",
        ),
    ],
)
def test_a_preset_that_does_not_fit_says_why(words: list[str], gpus: list[Gpu], why: str) -> None:
    with pytest.raises(HostError, match=why):
        check_fit(load(overrides=words), gpus)


def test_what_the_user_shows_is_what_there_is() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "5,2", "HONCHO_PROCESS_NAME": "timing_bench.1"}
    place(load(overrides=["placement=two_gpus"]), environment, lambda env: allowed(H100, env))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"
    with pytest.raises(HostError, match="has 1"):
        place(load(overrides=["placement=two_gpus"]), dict(environment), lambda env: allowed(H100, env))


@pytest.mark.parametrize(("file", "gpus"), [("gpu.yaml", 1), ("gpu_two.yaml", 2), ("gpu_split.yaml", 4)])
def test_every_preset_has_a_config_that_fits_exactly_so_many_gpus(file: str, gpus: int) -> None:
    config = load([CONFIGS / file])
    assert misfit(config, H100[:gpus]) == ""
    assert misfit(config, H100[: gpus - 1]) != ""


def test_a_sampler_of_several_gpus_gets_a_range_of_its_own() -> None:
    words = ["placement=split", "sampler.engine=vllm", "sampler.tensor_parallel=2", "sampler.data_parallel=1"]
    words += ["processes.sampler=2", "processes.timing_bench=2", "learner.processes=2"]
    got = seen(*words)
    assert [got[name] for name in PLACED] == ["0,1", "2,3", "4,5", "6", "7"]
    config = load(overrides=words)
    assert ranges(config)["sampler.2"] == "4-5"
    assert ranges(config)["timing_bench.1"] == "6"
    assert misfit(config, H100) == ""
    assert "processes.sampler=2 × 2 GPUs" in misfit(config, H100[:7])
    assert ranges(load()) == {}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["sampler.tensor_parallel=2"], r"sampler\.tensor_parallel=2 needs sampler\.engine=vllm"),
        (["sampler.data_parallel=2", "sampler.engine=vllm", "placement=one_gpu"], "gives the sampler a single GPU"),
        (["sampler.tensor_parallel=2", "sampler.engine=vllm", "device=cpu"], "needs GPUs, and device=cpu"),
        (["sampler.data_parallel=4", "sampler.engine=vllm", "sampler.slots=2"], r"more than sampler\.slots=2"),
        (["weights.transport=direct", "lora_rank=8"], "an adapter is small"),
        (
            ["weights.transport=direct", "sampler.engine=openai", "sampler.base_url=http://x/v1", "model_name=m"],
            "take no",
        ),
        (["weights.transport=direct", "placement=two_gpus"], "GPUs of their own"),
        (["weights.dtype=bfloat16", "lora_rank=8"], "is of full weights"),
    ],
)
def test_what_contradicts_is_refused_by_name(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(overrides=words)


@pytest.mark.parametrize(
    ("words", "sends"),
    [
        ([], False),
        (["weights.transport=direct"], True),
        (["placement=split"], True),
        (["placement=learner_apart"], True),
        (["placement=split", "weights.transport=files"], False),
        (["placement=split", "device=cpu"], False),
        (["placement=split", "lora_rank=8"], False),
        (["placement=one_gpu"], False),
    ],
)
def test_weights_are_sent_where_learner_and_samplers_have_gpus_of_their_own(words: list[str], sends: bool) -> None:
    assert load(overrides=words).sends_weights is sends
