"""Predicted memory, held against tensors that PyTorch really makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kbrl_async.learning.fused.memory import MemoryPlan
from kbrl_async.learning.logprobs import batch_logprobs
from kbrl_async.learning.optimizer import make_adamw
from kbrl_async.learning.packing import pack
from kbrl_async.learning.policies.models import causal_lm, wrap_lora
from kbrl_async.learning.recompute import Recompute
from kbrl_async.runs.sizing.footprint import (
    GB,
    LearnerSizing,
    Recomputed,
    SamplerSizing,
    layer_bytes,
    learner,
    transformers_sampler,
)
from kbrl_async.shapes import KNOWN, shape_of
from protocols.records import TrainSample
from tests.memory import PeakMemory

WIDE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
TOKENS, PROMPT = 256, 64
torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower


def trained(family: str, how: LearnerSizing) -> float:
    """Peak bytes of an update of two microbatches, after one that made the moments."""
    config = AutoConfig.for_model(family, **WIDE)
    dtype = torch.bfloat16 if how.held == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    model = wrap_lora(model, how.rank) if how.rank else model
    if how.recomputed is Recomputed.FULL:
        Recompute(causal_lm(model), offload=False).plan = MemoryPlan(0, 0)
    optimizer = make_adamw(model.parameters(), 1e-4)
    answer = [2] * (TOKENS - PROMPT)
    (batch,) = pack([TrainSample("r", [1] * PROMPT, answer, [0.0] * len(answer), 1.0, 0.0, 0)], TOKENS)
    with PeakMemory(model.parameters()) as memory:
        for microbatches in (1, 2):
            for _ in range(microbatches):
                with torch.autocast("cpu", torch.bfloat16, enabled=how.bf16):
                    logp_T, entropy_T = batch_logprobs(causal_lm(model), batch, 1.0)  # noqa: N806 - its shape
                (-logp_T.mean()).backward()  # type: ignore[no-untyped-call]
                del logp_T, entropy_T
            optimizer.step()
            optimizer.zero_grad()
    return float(memory.peak)


def plan(**given: Any) -> LearnerSizing:
    return LearnerSizing(**{"tokens": TOKENS, "scored": TOKENS - PROMPT, "on_gpu": False, "bf16": False, **given})


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen2", plan()),
        ("qwen2", plan(rank=8)),
        ("qwen2", plan(bf16=True)),
        ("llama", plan(rank=8, bf16=True, held="bf16")),
        ("qwen3", plan(bf16=True)),
        ("qwen3", plan(rank=8, bf16=True, recomputed=Recomputed.FULL)),
    ],
)
def test_the_peak_of_an_update_is_predicted_within_a_tenth(family: str, how: LearnerSizing) -> None:
    shape = shape_of({"model_type": family, **WIDE})
    assert learner(shape, how).total == pytest.approx(trained(family, how), rel=0.1)


def test_what_is_held_is_counted_by_hand() -> None:
    held = learner(KNOWN["Qwen2.5-7B"], plan(bf16=True, on_gpu=True)).parts
    weights = KNOWN["Qwen2.5-7B"].parameters
    assert held["weights"] == held["gradients"] == 4 * weights
    assert held["moments"] == 8 * weights


def test_moments_of_8_bits_are_a_quarter_and_their_scales() -> None:
    exact, packed = (learner(KNOWN["Qwen2.5-7B"], plan(eight_bit=eight_bit)).parts for eight_bit in (False, True))
    assert packed["moments"] == exact["moments"] / 4 * (1 + 4 / 256)
    assert {**packed, "moments": 0} == {**exact, "moments": 0}


def test_shards_split_what_is_held_and_add_what_is_gathered() -> None:
    whole = learner(KNOWN["Qwen2.5-7B"], plan()).parts
    shard = learner(KNOWN["Qwen2.5-7B"], plan(ranks=4, sharded=True)).parts
    for part in ("weights", "gradients", "moments"):
        assert shard[part] == whole[part] / 4
    assert 0 < shard["gathered layers"] < whole["weights"] / 4


@pytest.mark.parametrize(
    ("model", "rank", "tokens", "measured"),
    [
        ("Qwen2.5-1.5B", 0, 8192, 15.88),
        ("Qwen2.5-7B", 0, 8192, 70.38),
        ("Qwen2.5-7B", 0, 16384, 74.50),
        ("Qwen3-32B", 32, 16384, 57.7),
    ],
)
def test_what_two_h200_measured_is_predicted_within_a_tenth(
    model: str, rank: int, tokens: int, measured: float
) -> None:
    """`benchmarks.sharded updates`: peaks of PyTorch's allocator on a rank, which has no CUDA context in it."""
    how = LearnerSizing(
        tokens=tokens,
        scored=tokens * 3 // 4,
        rank=rank,
        held="bf16" if rank else "fp32",
        autocast=False,
        recomputed=Recomputed.FULL,
        ranks=2,
        sharded=True,
    )
    predicted = learner(KNOWN[model], how)
    assert (predicted.total - predicted.parts["CUDA"]) / GB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("model", "tokens", "measured"),
    [("Qwen2.5-7B", 8192, 103.52), ("Qwen2.5-7B", 16384, 132.63), ("Qwen3-8B", 16384, 133.04)],
)
def test_what_two_h200_measured_with_fused_kernels_is_predicted_to_a_twentieth(
    model: str, tokens: int, measured: float
) -> None:
    how = LearnerSizing(
        tokens=tokens,
        scored=tokens * 3 // 4,
        autocast=False,
        path="modules",
        recomputed=Recomputed.AUTO,
        room=0.9 * 139.8 * 2**30,
        ranks=2,
        sharded=True,
    )
    predicted = learner(KNOWN[model], how)
    assert (predicted.total - predicted.parts["CUDA"]) / GB == pytest.approx(measured, rel=0.05)


def test_autocast_keeps_copies_of_fp32_weights_for_fused_kernels_too() -> None:
    def copies(**given: Any) -> float:
        how = plan(tokens=8192, bf16=True, on_gpu=True, path="modules", recomputed=Recomputed.FULL, **given)
        return learner(KNOWN["Qwen3-4B"], how).parts.get("bf16 copies of weights", 0.0)

    assert copies() == pytest.approx(2 * KNOWN["Qwen3-4B"].parameters, rel=0.01)
    assert copies(held="bf16") == 0
    assert copies(ranks=2, sharded=True, autocast=False) == 0


def test_as_little_is_computed_again_as_there_is_room_for() -> None:
    def activations(room: float, **given: Any) -> float:
        how = plan(tokens=8192, bf16=True, on_gpu=True, room=room, **{"recomputed": Recomputed.AUTO, **given})
        return learner(KNOWN["Qwen2.5-0.5B"], how).parts["activations"]

    none = activations(1e12, recomputed=Recomputed.NONE)
    full = activations(1e12, recomputed=Recomputed.FULL)
    assert activations(1e12) == none
    assert activations(0.0) == full
    assert full < activations(12e9) < none
    assert full < activations(1e12, recomputed=Recomputed.SELECTIVE) < none


def test_weights_in_bf16_halve_what_is_held_and_the_host_takes_all_of_it() -> None:
    whole, half = (learner(KNOWN["Qwen3-4B"], plan(bf16=True, held=held)).parts for held in ("fp32", "bf16"))
    for part in ("weights", "gradients", "moments"):
        assert half[part] == whole[part] / 2
    assert "moments" not in learner(KNOWN["Qwen3-4B"], plan(on_host=True, ranks=2, sharded=True)).parts


def test_the_fused_learner_takes_no_more_than_its_room() -> None:
    how = plan(tokens=32768, rank=32, held="bf16", bf16=True, path="fused", recomputed=Recomputed.AUTO, on_gpu=True)
    free = learner(KNOWN["Qwen2.5-7B"], how)
    bound = learner(KNOWN["Qwen2.5-7B"], plan(**{**{f: getattr(how, f) for f in how.__struct_fields__}, "room": 40e9}))
    assert bound.total < 41e9 < free.total


def test_a_sampler_of_transformers_holds_two_copies_beside_its_cache() -> None:
    shape = KNOWN["Qwen2.5-0.5B"]
    held = transformers_sampler(shape, SamplerSizing(slots=8, length=1024, rank=8)).parts
    assert held["weights"] == held["versions"] == 4 * shape.parameters
    assert held["KV cache"] == shape.kv_bytes(4) * (8 * 1024 + 16_384)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen2", plan(rank=0)),
        ("qwen3", plan(rank=8)),
        ("llama", plan(rank=0, bf16=True)),
        ("qwen3", plan(rank=8, bf16=True, held="bf16")),
        ("qwen2", plan(rank=0, held="bf16", bf16=True)),
    ],
)
def test_what_a_layer_keeps_is_counted_to_a_hundredth(family: str, how: LearnerSizing) -> None:
    """By what autograd saves with two layers and with one."""

    def saved(layers: int) -> int:
        config = AutoConfig.for_model(family, **{**WIDE, "num_hidden_layers": layers})
        dtype = torch.bfloat16 if how.held == "bf16" else torch.float32
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
        model = wrap_lora(model, how.rank) if how.rank else model
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if TOKENS in tensor.shape:  # no weight is so wide
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=how.bf16),
        ):
            decoder: Any = causal_lm(model)
            hidden = decoder.get_decoder()(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False)
        assert hidden is not None, "what is saved lives with the graph"
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    shape = shape_of({"model_type": family, **WIDE})
    assert saved(2) - saved(1) == pytest.approx(TOKENS * layer_bytes(shape, how), rel=0.01)
