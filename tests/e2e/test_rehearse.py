"""`kbrl rehearse` on the CPU: every process of a run, at a toy's shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
WORDS = ("batch_size=2", "group_size=4", "max_steps=2", "level=1", "lora_rank=8", "timing_bench.timed=false",
         "reward.preset=stage2", "reward.speed_weight=0", "device=cpu", "cache_path=cache")  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_model_that_is_a_config_alone_is_trained_on_given_answers(tmp_path: Path) -> None:
    (folder := tmp_path / "toy").mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    command = [sys.executable, "-m", "kbrl_async", "rehearse", "--model", str(folder), "--length", "60:1.2"]
    done = subprocess.run(
        [*command, "--right", "0.5", "--json", *WORDS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert found["updates"] == 2
    assert found["tokens_median"] > 50
    assert 0.2 < found["correct"] < 1
    assert {p["name"] for p in found["processes"]} >= {"learner.1", "sampler.1", "timing_bench.1", "compile_farm.1"}
    assert not list(tmp_path.rglob("model-*.safetensors")), "random weights stay only with --keep"
