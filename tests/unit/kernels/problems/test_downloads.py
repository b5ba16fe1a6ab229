"""Problems that load models of the hub say what they need before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.funnel import Verifier
from kbrl_async.kernels.problems import downloads
from protocols.records import Problem

SOURCE = """
from transformers import AutoConfig, AutoModelForCausalLM

class Model:
    def __init__(self, model_name, config):
        self.model_name = model_name
        self.model = AutoModelForCausalLM.from_pretrained(self.model_name, config=config)

model_name = "owner/tiny"
config = AutoConfig.from_pretrained(model_name)
"""


def problem(source: str = SOURCE) -> Problem:
    return Problem("L4/1_tiny", 4, "1_tiny", source)


def test_the_model_is_named_with_what_is_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert downloads.models_of(problem()) == ["owner/tiny"]
    monkeypatch.delenv(downloads.CACHE, raising=False)
    with pytest.raises(ProblemError, match=r"L4/1_tiny loads owner/tiny of the hub, and HF_HUB_CACHE.* is not set"):
        downloads.check([problem()])
    monkeypatch.setenv(downloads.CACHE, str(tmp_path))
    with pytest.raises(ProblemError, match=r"has no such model.*hf download owner/tiny"):
        downloads.check([problem()])
    snapshot = tmp_path / "models--owner--tiny/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ProblemError, match="has no such model"):
        downloads.check([problem()])
    (snapshot / "model.safetensors").write_text("")
    downloads.check([problem()])


def test_other_problems_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(downloads.CACHE, raising=False)
    assert downloads.models_of(problem("x = 1")) == []
    downloads.check([problem("x = 1"), problem("import torch\ntorch.load('x')")])
    assert downloads.models_of(problem("m = A.from_pretrained('gpt2')")) == ["gpt2"]


def test_an_object_that_cannot_reach_the_sandbox_is_named_before_anything_is_downloaded() -> None:
    handed = (
        "tokenizer = AutoTokenizer.from_pretrained(model_name)\n\n\ndef get_init_inputs():\n    return [tokenizer]\n"
    )
    with pytest.raises(ProblemError, match=r"loads owner/tiny of the hub, and gives .*\(tokenizer\).*level=1,2,3"):
        downloads.check([problem(SOURCE + handed)])


def test_a_configuration_is_handed_on_as_kernelbenchs_level_4_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(downloads.CACHE, str(tmp_path))
    level4 = SOURCE + "\n\ndef get_init_inputs():\n    return [model_name, config]\n"
    with pytest.raises(ProblemError, match="has no such model"):
        downloads.check([problem(level4)])


def test_verifying_says_it_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(downloads.CACHE, raising=False)
    with pytest.raises(ProblemError, match="HF_HUB_CACHE"), Verifier() as verifier:
        verifier.verify(problem(), "import torch\n", "c")
