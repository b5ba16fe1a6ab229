"""An exported policy loads as any Hugging Face model does, and computes what the trained one computed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kbrl_async import cli
from kbrl_async.durable import file_sha256
from kbrl_async.errors import CheckpointError, ConfigError, PolicyMismatch
from kbrl_async.lab.small_policy.making import train_tokenizer
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.exporting import ABOUT, export
from kbrl_async.learning.policies.models import active, add_adapters, causal_lm, wrap_lora
from kbrl_async.runs.config import load, to_yaml
from kbrl_async.runs.origins import base_model
from kbrl_async.weights import MADE
from protocols.records import TrainGroup
from tests.unit.learning.rank import LORA_RANK
from tests.unit.learning.test_process_group import run_ranks

CANARY = [1, 2, 3, 4, 5]
IDS = torch.tensor([[7, 8, 9, 3, 1]])


def publish(folder: Path, model: torch.nn.Module, base: str = "") -> Path:
    versions.publish(folder, model, 3, 2, 3, CANARY, base)
    return versions.version_folder(folder, 3)


@pytest.fixture
def base(tmp_path: Path, model: torch.nn.Module) -> str:
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return str(tmp_path / "base")


@pytest.fixture
def lora(model: torch.nn.Module, base: str) -> torch.nn.Module:  # after `base`: peft changes the model in place
    wrapped = wrap_lora(model, rank=2)
    add_adapters(wrapped, ["corrector"])
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)  # peft begins with zeros, which would hide everything
    return wrapped


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(IDS).logits
    return out


def test_a_full_policy_is_exported_as_it_is(tmp_path: Path, model: torch.nn.Module, base: str) -> None:
    (Path(base) / MADE).write_text("{}")
    made = export(publish(tmp_path, model, base), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    assert (tmp_path / "out" / MADE).is_file(), "which tells how a policy of ours is asked"
    assert (made.kind, made.policy_version) == ("full", 3)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "adapter"])
def test_an_adapter_gives_the_same_logits_merged_and_as_it_is(
    tmp_path: Path, lora: torch.nn.Module, base: str, merge: bool
) -> None:
    expected = logits(causal_lm(lora))
    export(publish(tmp_path, lora, base), tmp_path / "out", merge=merge)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-3)
    assert (tmp_path / "out" / "adapter_config.json").is_file() is not merge
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), expected, atol=1e-2)


def test_the_adapter_of_a_role_is_chosen_by_name(tmp_path: Path, lora: torch.nn.Module, base: str) -> None:
    with active(lora, "corrector"):
        expected = logits(causal_lm(lora))
    export(publish(tmp_path, lora, base), tmp_path / "out", merge=True, role="corrector")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected, rtol=0, atol=1e-3
    )


def test_the_manifest_names_version_dtype_and_the_sum_of_each_file(
    tmp_path: Path, model: torch.nn.Module, base: str
) -> None:
    export(publish(tmp_path, model, base), tmp_path / "out", dtype="bf16")
    about = json.loads((tmp_path / "out" / ABOUT).read_text())
    assert (about["policy_version"], about["dtype"]) == (3, "bf16")
    for name, digest in about["sha256"].items():
        assert file_sha256(tmp_path / "out" / name) == digest
    assert set(about["sha256"]) == {path.name for path in (tmp_path / "out").iterdir()} - {ABOUT}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_exists_is_not_overwritten(tmp_path: Path, model: torch.nn.Module) -> None:
    policy = publish(tmp_path, model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export(policy, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_a_base_that_is_not_the_one_that_was_trained_is_found(tmp_path: Path, lora: torch.nn.Module, base: str) -> None:
    policy = publish(tmp_path, lora, base)
    other = AutoModelForCausalLM.from_pretrained(base)
    for parameter in other.parameters():
        parameter.data.normal_(0, 0.5)
    other.save_pretrained(base)
    with pytest.raises(PolicyMismatch, match="canary"):
        export(policy, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"merge": True}, "no adapter to merge"), ({"dtype": "fp8"}, "unknown dtype"), ({"role": "judge"}, "no adapter")],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, model: torch.nn.Module, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        export(publish(tmp_path, model), tmp_path / "out", **settings)  # type: ignore[arg-type]


def test_a_damaged_policy_is_not_exported(tmp_path: Path, model: torch.nn.Module) -> None:
    policy = publish(tmp_path, model)
    (policy / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="SHA-256"):
        export(policy, tmp_path / "out")


def test_a_run_s_policy_is_a_model_to_start_from(tmp_path: Path, lora: torch.nn.Module, base: str) -> None:
    """Its adapter merged, made once for these weights."""
    expected = logits(causal_lm(lora))
    run = tmp_path / "runs" / "mine"
    publish(run / "policies", lora, base)
    (run / "config.yaml").write_text("{}\n")
    config = load(overrides=[f"model_name={run}", f"cache_path={tmp_path / 'cache'}"])
    found = Path(base_model(config, lambda _what, _share: None))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(found)), expected, rtol=0, atol=1e-3)
    assert not (found / "adapter_config.json").exists()
    (found / "mark").touch()
    assert (Path(base_model(config, lambda _what, _share: None)) / "mark").is_file(), "not made again"


@pytest.mark.long
@pytest.mark.parametrize("how", ["full", "lora"])
def test_a_checkpoint_that_two_ranks_wrote_is_exported_bit_by_bit(
    tmp_path: Path, model: torch.nn.Module, groups: list[TrainGroup], how: str
) -> None:
    run, out = tmp_path / "runs" / "mine", tmp_path / "out"
    model.resize_token_embeddings(400)  # type: ignore[operator]
    model.save_pretrained(run / "base")  # type: ignore[operator]
    train_tokenizer(["def forward(self, x): return x", "class Model"], 300).save_pretrained(str(run / "base"))
    words = [f"model_name={run / 'base'}", f"lora_rank={0 if how == 'full' else LORA_RANK}"]
    (run / "config.yaml").write_text(to_yaml(load(overrides=words)))
    (run / "groups.json").write_bytes(msgspec.json.encode(groups))
    run_ranks(run, how, 2)
    checkpoint = run / "checkpoints" / "step-000003"
    assert len(list(checkpoint.glob("shard-*.safetensors"))) == 2
    assert cli.main(["export", str(checkpoint), str(out)]) == 0
    trained = load_file(run / "weights-2.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    found = dict(loaded.named_parameters())
    began = dict(AutoModelForCausalLM.from_pretrained(run / "base").named_parameters())
    assert trained
    for name, weights in trained.items():
        name = name.removeprefix("base_model.model.")
        assert torch.equal(found[name], weights), name
        assert name not in began or not torch.equal(found[name], began[name]), f"{name} was not trained"
