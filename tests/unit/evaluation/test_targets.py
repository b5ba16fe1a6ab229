"""Which policy a person means, and that it stands proven where samplers look."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kbrl_async.cli.export import policy_of
from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.lab.small_policy.making import train_tokenizer
from kbrl_async.learning import checkpoints
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import causal_lm, load_model
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import load, to_yaml
from kbrl_async.runs.publishing import publish
from kbrl_async.runs.targets import Target, resolve
from kbrl_async.weights import prove
from tests.models import tiny_model, update_settings

CANARY = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    model = tiny_model()
    model.resize_token_embeddings(400)  # type: ignore[operator]
    model.save_pretrained(str(folder))  # type: ignore[operator]
    train_tokenizer(["def forward(self, x): return x", "class Model"], 300).save_pretrained(str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path, base: Path) -> Path:
    """A training run with policies 3, 4 and 12 and a checkpoint of version 4."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load(overrides=["name=mine", f"model_name={base}"])))
    model = load_model(str(base))
    for version in (3, 4, 12):
        versions.publish(folder / "policies", model, version, None, version, CANARY, str(base))
    trainer = Trainer(model, update_settings(), "cpu")
    with torch.no_grad():
        next(model.parameters()).add_(0.25)
    checkpoints.save(folder / "checkpoints", trainer, checkpoints.LearnerProgress(version=4), keep_checkpoints=2)
    return folder


def test_a_run_is_its_newest_policy(run: Path) -> None:
    for what in (str(run), "mine"):
        target = resolve(what, run.parent)
        assert (target.kind, target.version, target.label, target.run) == ("policy", 12, "mine-v12", str(run))


def test_another_version_can_be_chosen_if_it_is_still_there(run: Path) -> None:
    assert resolve("mine", run.parent, "v4").version == 4
    with pytest.raises(CheckpointError, match="It keeps: 3, 4, 12"):
        resolve("mine", run.parent, "7")
    with pytest.raises(UserError, match="newest, best, or a number"):
        resolve("mine", run.parent, "first")


def test_the_best_is_what_evaluations_during_training_found(run: Path) -> None:
    with pytest.raises(CheckpointError, match="eval_every"):
        resolve("mine", run.parent, "best")
    versions.hold(run / "policies", best=4, evaluated=12)
    assert resolve("mine", run.parent, "best").version == 4
    assert versions.collect_garbage(run / "policies", 1, versions.held(run / "policies").values()) == [3]


def test_folders_and_names_are_told_apart(run: Path, tmp_path: Path, base: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    kinds = {
        str(run / "policies" / "policy-v3"): "policy",
        str(run / "checkpoints" / "step-000004"): "checkpoint",
        str(adapter): "adapter",
        str(base): "model",
        "Qwen/Qwen2.5-Coder-7B": "model",
        "small": "model",
        "http://127.0.0.1:8000/v1": "endpoint",
    }
    assert {what: resolve(what, run.parent).kind for what in kinds} == kinds
    assert resolve("http://127.0.0.1:8000/v1", run.parent).label == "127.0.0.1-8000"


@pytest.mark.parametrize("what", ["nothing", "./nothing", "/no/such/folder"])
def test_what_names_nothing_is_refused_with_what_would(what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no policy {what}.*endpoint"):
        resolve(what, tmp_path)


def test_a_folder_without_a_policy_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        resolve(str(tmp_path / "empty"), tmp_path)


def test_a_run_that_has_no_policy_yet_says_so(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("{}")
    with pytest.raises(CheckpointError, match="neither policies nor checkpoints"):
        resolve("new", tmp_path)


def test_a_published_version_is_taken_over_as_it_is(run: Path, tmp_path: Path) -> None:
    facts = publish(resolve("mine", run.parent), tmp_path / "policies", load())
    manifest, folder = versions.newest(tmp_path / "policies")  # type: ignore[misc]
    source = versions.load_manifest(run / "policies" / "policy-v12")
    prove(folder, manifest)
    assert (manifest, facts["version"]) == (source, 12)


def test_a_damaged_version_is_refused(run: Path, tmp_path: Path) -> None:
    weights = run / "policies" / "policy-v12" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="SHA-256"):
        publish(resolve("mine", run.parent), tmp_path / "policies", load())
    assert versions.newest(tmp_path / "policies") is None


def test_a_checkpoint_of_a_run_is_exported_as_a_policy(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-000004"
    with policy_of(str(checkpoint)) as policy:
        manifest = versions.load_manifest(policy)
        prove(policy, manifest)
    assert manifest.version == 4
    checkpoint.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="in no run's folder"), policy_of(str(tmp_path / "elsewhere")):
        pass


def test_a_checkpoint_is_published_with_its_own_weights_and_canary(run: Path, tmp_path: Path, base: Path) -> None:
    target = resolve(str(run / "checkpoints" / "step-000004"), run.parent)
    config = load(overrides=[f"model_name={base}"])
    publish(target, tmp_path / "policies", config)
    manifest, folder = versions.newest(tmp_path / "policies")  # type: ignore[misc]
    assert manifest.version == 4
    stored = versions.load_manifest(run / "policies" / "policy-v4")
    assert manifest.weights_sha256 != stored.weights_sha256, "the checkpoint's weights differ from the policy's here"
    model = load_model(str(base))
    versions.load_weights(folder, model)
    assert sequence_logprobs(causal_lm(model), manifest.canary_ids) == pytest.approx(manifest.canary_logprobs)


def test_a_model_folder_is_version_0_of_itself(base: Path, tmp_path: Path) -> None:
    facts = publish(resolve(str(base), tmp_path), tmp_path / "policies", load())
    assert (facts["version"], facts["base_model"], facts["kind"]) == (0, str(base), "model")
    again = publish(resolve(str(base), tmp_path), tmp_path / "policies", load())
    assert again == facts, "a second start of the command finds it there"


def test_an_adapter_is_published_on_the_base_that_it_names(base: Path, tmp_path: Path) -> None:
    model = load_model(str(base), lora_rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)
    model.save_pretrained(str(tmp_path / "adapter"))  # type: ignore[operator]
    publish(resolve(str(tmp_path / "adapter"), tmp_path), tmp_path / "policies", load())
    manifest, folder = versions.newest(tmp_path / "policies")  # type: ignore[misc]
    assert (manifest.kind, manifest.base_model) == ("lora", str(base))
    assert (folder / "adapter_model.safetensors").is_file()
    plain = sequence_logprobs(load_model(str(base)), manifest.canary_ids)
    assert manifest.canary_logprobs != pytest.approx(plain), "the canary is the adapter's, not the base's"


def test_an_adapter_without_a_base_asks_for_one(base: Path, tmp_path: Path) -> None:
    model = load_model(str(base), lora_rank=2)
    model.save_pretrained(str(tmp_path / "adapter"))  # type: ignore[operator]
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="model_name"):
        publish(resolve(str(tmp_path / "adapter"), tmp_path), tmp_path / "policies", load())


def test_an_endpoint_needs_no_policy(tmp_path: Path) -> None:
    target = Target("endpoint", "http://x/v1", "x")
    facts = publish(target, tmp_path / "policies", load(overrides=["model_name=m"]))
    assert facts["model"] == "m"
    assert not (tmp_path / "policies").exists()
