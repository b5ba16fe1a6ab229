"""Whether a configuration fits, and what is recommended where it is asked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from kbrl_async.errors import HostError, UserError
from kbrl_async.runs.config import Config, load
from kbrl_async.runs.config.placement import RESERVE, Gpu, wanted
from kbrl_async.runs.sizing.advice import BENCH_ROOM, USEFUL_SLOTS, Wish, as_tree, capacity_of, recommend
from kbrl_async.runs.sizing.footprint import GB
from kbrl_async.runs.sizing.layout import BENCH, check, checkpoints_on_disk, learning_of, misfit, tenants
from kbrl_async.shapes import KNOWN

H100, H200 = Gpu("0", "NVIDIA H100", 79.2), Gpu("0", "NVIDIA H200", 140.0)
HOST = 16 * GB
CONFIGS = Path(__file__).parents[4] / "configs"


def config(*words: str) -> Config:
    return load((), words)


def test_full_weights_on_one_gpu_are_refused_with_the_largest_part_and_a_cure() -> None:
    asked = config("model_name=Qwen2.5-7B", "device=cuda", "sampler.engine=vllm", "max_tokens=4096")
    with pytest.raises(HostError, match=r"GPU 0 has 85 GB.*GB of moments in learner.*lora_rank=32"):
        check(asked, KNOWN["Qwen2.5-7B"], [H100], HOST)


def test_the_same_with_an_adapter_fits() -> None:
    asked = config("model_name=Qwen2.5-7B", "device=cuda", "sampler.engine=vllm", "max_tokens=4096", "lora_rank=32",
                   "learner.memory_gb=30", "sampler.memory_share=0.4", "sampler.slots=16")  # fmt: skip
    assert misfit(asked, KNOWN["Qwen2.5-7B"], [H100], HOST) is None


@pytest.mark.parametrize(
    ("name", "shape", "gpu", "count"),
    [
        ("kernelbench", "Qwen2.5-7B", H100, 1),
        ("kernelbench_dr_kernel", "Qwen2.5-7B", H100, 4),
        ("kernelbench_kevin_32b", "Qwen3-32B", H200, 4),
    ],
)
def test_recipes_for_real_models_fit_the_gpus_that_they_name(name: str, shape: str, gpu: Gpu, count: int) -> None:
    asked = load([CONFIGS / f"{name}.yaml"])
    assert wanted(asked) == count
    host = [msgspec.structs.replace(gpu, id=str(place)) for place in range(count)]
    assert misfit(asked, KNOWN[shape], host, HOST) is None
    assert (asked.learner.epochs, asked.learner.negative_scale, asked.learner.scale_advantages) == (1, 1, False)
    too_small = [msgspec.structs.replace(one, memory_gib=10.0) for one in host]
    assert misfit(asked, KNOWN[shape], too_small, HOST) is not None


def test_a_learner_leaves_vllm_its_part_of_the_same_gpu() -> None:
    """It took nine tenths, whatever else was there, and the benches found no memory."""
    words = ("model_name=Qwen2.5-7B", "lora_rank=32", "sampler.engine=vllm", "sampler.memory_share=0.4")
    shared, apart = config(*words, "placement=one_gpu"), config(*words, "placement=learner_apart")
    rooms = [learning_of(one, KNOWN["Qwen2.5-7B"], 100 * GB).room for one in (shared, apart)]
    assert rooms == pytest.approx([35 * GB, 90 * GB]), "benches have their part"
    said = config(*words, "placement=one_gpu", "learner.memory_gb=70")
    assert learning_of(said, KNOWN["Qwen2.5-7B"], 100 * GB).room == 70 * GB


def test_a_sampler_that_holds_copies_in_fp32_is_named() -> None:
    asked = config("model_name=Qwen2.5-14B", "device=cuda", "lora_rank=32", "placement=one_gpu")
    why = misfit(asked, KNOWN["Qwen2.5-14B"], [H200], HOST)
    assert why is not None
    assert "sampler.1" in why.cause
    assert "sampler.engine=vllm" in why.cure


def test_verifiers_take_room_where_they_are_placed() -> None:
    asked = config("model_name=Qwen2.5-7B", "lora_rank=32", "placement=split", "processes.verifier=2", "backend=triton")
    at = {tenant.name: tenant.gpus for tenant in tenants(asked, KNOWN["Qwen2.5-7B"], 80 * GB)}
    assert [at[name] for name in ("sampler.1", "timing_bench.2", "verifier.1", "verifier.2")] == [
        range(1, 2), range(3, 4), range(4, 5), range(4, 5),
    ]  # fmt: skip


def test_a_sampler_of_vllm_takes_what_it_was_measured_to_take() -> None:
    """117.7 GB of an H200, and 121.2 while weights came: as long as a sequence may be, not as the run's are."""
    words = "model_name=Qwen3-8B device=cuda lora_rank=0 max_tokens=2366 placement=split learner.processes=2"
    more = "learner.shard=true sampler.engine=vllm sampler.slots=128 sampler.memory_share=.9"
    found = {t.name: t for t in tenants(config(*words.split(), *more.split()), KNOWN["Qwen3-8B"], 139.8 * 2**30)}
    assert found["sampler.1"].footprint.total / GB == pytest.approx(119.5, rel=0.02)


def test_a_run_on_the_cpu_is_held_against_the_hosts_memory() -> None:
    assert misfit(config(), KNOWN["Qwen2.5-0.5B"], [], 64 * GB) is None
    why = misfit(config("model_name=Qwen2.5-7B", "device=cpu"), KNOWN["Qwen2.5-7B"], [H200], HOST)
    assert why is not None
    assert "this host has 16 GB" in why.cause


@pytest.mark.parametrize(
    ("words", "gb"),
    [
        ("lora_rank=0 max_steps=20", 295),  # two are kept, and one is being written
        ("lora_rank=0 max_steps=20 learner.checkpoint_every=20", 197),
        ("lora_rank=0 max_steps=20 learner.checkpoint_every=50", 197),  # the first and the last
        ("lora_rank=0 max_steps=20 learner.checkpoint_every=50 sampler.forced=answers.json", 98),
        ("lora_rank=0 max_steps=20 learner.checkpoint_every=50 learner.optimizer=adamw_8bit", 99),
        ("lora_rank=32 max_steps=20", 3.1),
    ],
)
def test_checkpoints_are_of_what_is_trained_and_its_moments(words: str, gb: float) -> None:
    """One of Qwen3-8B was 98 GB on the disk of a GPU host."""
    made = config("model_name=Qwen3-8B", "device=cuda", *words.split())
    assert checkpoints_on_disk(made, KNOWN["Qwen3-8B"]) / GB == pytest.approx(gb, rel=0.02)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("rank", [32, 0])
@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-4B", "Qwen3-32B", "Llama-3.1-8B"])
def test_what_is_recommended_loads_and_fits(tmp_path: Path, model: str, rank: int, gpus: int) -> None:
    wish = Wish(model=model, gpus=gpus, capacity=150.7 * GB, rank=rank)
    advice = recommend(KNOWN[model], wish)
    if not advice.settings:
        assert advice.problem
        return
    (file := tmp_path / "model.yaml").write_text(yaml.safe_dump(as_tree(advice.settings)))
    asked = load([file])
    assert misfit(asked, KNOWN[model], [H200] * gpus, HOST) is None


def test_an_adapter_of_seven_billion_fits_on_one_gpu_and_full_weights_of_them_do_not() -> None:
    shape = KNOWN["Qwen2.5-7B"]
    assert recommend(shape, Wish(model="m", gpus=1, capacity=150.7 * GB)).settings["placement"] == "one_gpu"
    full = recommend(shape, Wish(model="m", gpus=1, capacity=150.7 * GB, rank=0))
    assert not full.settings
    assert full.problem


@pytest.mark.parametrize(
    ("model", "gpus", "rank", "capacity", "has_room"),
    [("Qwen2.5-7B", 1, 32, 150.7, True), ("Qwen3-4B", 2, 0, 150.7, True), ("Qwen2.5-1.5B", 1, 32, 24.1, False)],
)
def test_a_bench_on_the_policys_gpu_is_left_room_where_that_costs_no_more_than_slots(
    model: str, gpus: int, rank: int, capacity: float, has_room: bool
) -> None:
    found = recommend(KNOWN[model], Wish(model=model, gpus=gpus, capacity=capacity * GB, rank=rank)).settings
    left = (1 - RESERVE - found["sampler.memory_share"]) * capacity - found.get("learner.memory_gb", 0.0)
    assert left >= (BENCH_ROOM if has_room else BENCH) / GB - 0.01 * capacity, "shares are rounded up"
    assert (left >= BENCH_ROOM / GB - 0.01 * capacity) is has_room
    assert has_room is (found["sampler.slots"] >= USEFUL_SLOTS)


def test_a_gpu_is_known_by_its_name_or_by_its_memory() -> None:
    assert capacity_of("NVIDIA H200", None) == capacity_of("h200", None) > capacity_of("h100", None)
    assert capacity_of("", 24.0) == 24 * GB
    with pytest.raises(UserError, match="its memory is not known"):
        capacity_of("gtx", None)
    with pytest.raises(UserError, match="is no size"):
        capacity_of("h200", -1.0)
