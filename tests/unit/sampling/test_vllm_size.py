"""What vLLM needs of a GPU follows from a small model's shape; a large one measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.errors import ConfigError, MissingTool
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.vllm.options import VLLMOptions, arguments
from kbrl_async.sampling.vllm.start import BESIDE_BYTES, BLOCK_TOKENS, check_split, fitted
from tests.unit.sampling.fake_vllm import vllm_options

GIB = 1 << 30
KNOWN = frozenset(
    {
        *("logprobs_mode", "skip_tokenizer_init", "tensor_parallel_size", "data_parallel_size", "max_num_seqs"),
        *("enable_prefix_caching", "enable_chunked_prefill"),
    }
)
SMALL = {
    "vocab_size": 600,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "hidden_size": 384,
    "max_position_embeddings": 1024,
}
# Qwen2.5-7B: grouped keys and values.
LARGE = {
    "vocab_size": 152064,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
}


def model(folder: Path, shape: dict[str, Any] | None, weights: int = 1000) -> str:
    if shape is not None:
        (folder / "config.json").write_text(json.dumps(shape))
    if weights:
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(weights)
    return str(folder)


def options(name: str, **given: Any) -> VLLMOptions:
    return vllm_options(name, dtype="float32", slots=64, memory_share=0.2, **given)


def test_a_small_model_gets_a_cache_for_every_slot_and_measures_nothing(tmp_path: Path) -> None:
    found = fitted(options(model(tmp_path, SMALL)), 141 * GIB)
    assert found.kv_bytes == 18432 * (1024 + BLOCK_TOKENS) * 65
    assert found.settings.memory_share == pytest.approx((found.kv_bytes + 2000 + BESIDE_BYTES) / (141 * GIB))
    given = arguments(found, frozenset(["logprobs_mode", "skip_tokenizer_init", "kv_cache_memory_bytes"]))
    assert given["kv_cache_memory_bytes"] == found.kv_bytes


def test_gpus_share_weights_and_heads_and_copies_share_slots(tmp_path: Path) -> None:
    one = fitted(options(model(tmp_path, SMALL)), 141 * GIB)
    split = fitted(options(model(tmp_path, SMALL), tensor_parallel=2, data_parallel=2), 141 * GIB)
    assert one.kv_bytes is not None
    assert split.kv_bytes == one.kv_bytes // 2 // 65 * 33
    given = arguments(split, KNOWN)
    assert (given["tensor_parallel_size"], given["data_parallel_size"], given["max_num_seqs"]) == (2, 2, 32)


def test_a_model_that_can_t_be_split_so_is_refused_before_it_loads(tmp_path: Path) -> None:
    name = model(tmp_path, SMALL)
    check_split(name, 3)
    with pytest.raises(ConfigError, match=r"tensor_parallel=4 does not divide the 6 attention heads"):
        check_split(name, 4)


def test_a_vllm_that_knows_no_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    name = model(tmp_path, SMALL)
    with pytest.raises(MissingTool, match="can't use 2 GPUs"):
        arguments(options(name, tensor_parallel=2), KNOWN - {"tensor_parallel_size"})


def test_prefixes_and_pieces_of_prompts_are_settings() -> None:
    given = arguments(options("m", prefix_caching=False, chunked_prefill=False), KNOWN)
    assert (given["enable_prefix_caching"], given["enable_chunked_prefill"]) == (False, False)
    assert all(arguments(options("m"), KNOWN)[name] for name in ("enable_prefix_caching", "enable_chunked_prefill"))


def test_a_deadline_follows_the_longest_answer() -> None:
    assert Sampler().answer_deadline_s(256) == pytest.approx(300 + 256 / 5)
    assert Sampler(min_tokens_per_s=20.0).answer_deadline_s(32_000) == pytest.approx(1900)
    assert Sampler(deadline_s=60.0).answer_deadline_s(32_000) == 60.0


def test_a_shorter_context_takes_less(tmp_path: Path) -> None:
    found = fitted(options(model(tmp_path, SMALL), max_model_len=512), 141 * GIB)
    assert found.kv_bytes == 18432 * (512 + BLOCK_TOKENS) * 65


def test_where_not_every_slot_can_be_at_its_longest_the_cache_fills_the_share(tmp_path: Path) -> None:
    found = fitted(options(model(tmp_path, LARGE, 5 * GIB)), 141 * GIB)
    share = found.settings.memory_share
    assert found.kv_bytes == int(share * 141 * GIB) - 10 * GIB - BESIDE_BYTES
    assert share == pytest.approx(options("m").settings.memory_share)


def test_a_base_under_adapters_is_held_once(tmp_path: Path) -> None:
    whole = fitted(options(model(tmp_path, LARGE, 5 * GIB)), 141 * GIB)
    adapted = fitted(options(model(tmp_path, LARGE, 5 * GIB), lora_rank=32), 141 * GIB)
    assert whole.kv_bytes is not None
    assert adapted.kv_bytes == whole.kv_bytes + 5 * GIB


@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        (LARGE, 12 * GIB),
        (None, 1000),
        (SMALL, 0),
        ({**SMALL, "mamba_d_state": 16}, 1000),
        ({"text_config": SMALL}, 1000),
        ({"hidden_size": 1}, 1000),
    ],
    ids=["too much for its share", "no config", "no weights", "with states", "with eyes", "of another kind"],
)
def test_what_does_not_follow_from_the_shape_is_measured(
    tmp_path: Path, shape: dict[str, Any] | None, weights: int
) -> None:
    given = options(model(tmp_path, shape, weights))
    assert fitted(given, 141 * GIB) == given


def test_a_name_of_the_hub_is_measured() -> None:
    given = options("Qwen/Qwen2.5-7B")
    assert fitted(given, 141 * GIB) == given
