"""KernelBench's level 4 with random weights: what a problem loads is found as if it had been fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.verification import level4
from kbrl_async.kernels.problems import downloads

transformers = pytest.importorskip("transformers")


def test_a_model_is_where_a_problem_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = level4.Shape("gpt2", {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 4})
    monkeypatch.setattr(
        level4, "MODELS", {"owner/tiny": tiny, "owner/other": tiny, "owner/later": level4.Shape("none")}
    )
    monkeypatch.setenv(downloads.CACHE, str(tmp_path))
    assert not downloads.is_there("owner/tiny")
    found = level4.models(to=tmp_path, only="tiny|later")
    assert (found["written"], found["unknown"], found["ok"]) == (["owner/tiny"], ["owner/later"], True)
    assert downloads.is_there("owner/tiny")
    assert not downloads.is_there("owner/other")
    where = {"cache_dir": tmp_path, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained("owner/tiny", **where)
    model = transformers.AutoModelForCausalLM.from_pretrained("owner/tiny", config=config, **where)
    assert model.transformer.wte.weight.shape == (11, 8)


def test_every_model_of_level_4_is_of_a_kind_that_transformers_takes_with_these_fields() -> None:
    for name, shape in level4.MODELS.items():
        mapping = transformers.CONFIG_MAPPING
        kind = shape.kind if shape.kind in mapping else shape.kind.replace("_", "-")
        if kind in mapping:
            made = mapping[kind](**shape.fields).to_dict()
            told = {field: made[field] for field in shape.fields if field in made}
            assert told == {field: shape.fields[field] for field in told}, name
