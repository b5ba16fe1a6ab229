"""`model_name=runs/NAME`: the run's newest policy, asked as that run asked it; what was said oneself wins."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import CheckpointError
from kbrl_async.runs.config import Config, load, to_yaml
from kbrl_async.weights import MADE

HOW = ["backend=cpp", "max_tokens=77", "prompt.hardware=false"]


def make_run(folder: Path, *versions: int, words: list[str] = HOW) -> Path:
    for version in versions:
        policy = folder / "policies" / f"policy-v{version}"
        policy.mkdir(parents=True)
        (policy / "COMPLETE").touch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(load(overrides=words)))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs" / "mine", 2, 10)


@pytest.mark.parametrize("named", ["runs/mine", "runs/mine/checkpoints/final", "runs/mine/policies/policy-v10"])
def test_a_run_is_its_newest_policy(run: Path, named: str) -> None:
    config = load(overrides=[f"model_name={named}"])
    assert Path(config.model_name).resolve() == run / "policies" / "policy-v10"
    assert (config.backend, config.max_tokens, config.prompt.hardware) == ("cpp", 77, False)
    assert config.prompt_option == "compact", "which is what the small policy reads"
    assert config.learning_rate == Config().learning_rate


def test_what_is_said_oneself_wins(run: Path) -> None:
    config = load(overrides=["model_name=runs/mine", "max_tokens=99", "prompt.option=zero_shot"])
    assert (config.max_tokens, config.prompt.option, config.backend) == (99, "zero_shot", "cpp")
    assert config.prompt.hardware is Config().prompt.hardware, "the rest of a prompt goes with its option"


def test_a_run_that_began_with_a_run_asks_as_the_first_did(run: Path) -> None:
    make_run(run.parent / "second", 0, words=["model_name=runs/mine"])
    config = load(overrides=["model_name=runs/second"])
    assert (config.prompt_option, config.max_tokens) == ("compact", 77)


def test_a_run_with_retrieved_examples_goes_on_with_prompts_of_its_size(run: Path) -> None:
    make_run(run.parent / "shown", 0, words=["prompt.option=raicl", "prompt.index=index"])
    config = load(overrides=["model_name=runs/shown"])
    assert (config.prompt.option, config.prompt_option) == ("raicl", "compact")


def test_what_was_stored_is_read_when_the_first_run_is_gone(run: Path, tmp_path: Path) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(load(overrides=["model_name=runs/mine"])))
    before = load([stored])
    run.rename(tmp_path / "elsewhere")
    assert load([stored]) == before


def test_a_run_without_a_policy_says_so(run: Path) -> None:
    make_run(run.parent / "new")
    with pytest.raises(CheckpointError, match=r"runs/new holds no policy yet \(command line\)"):
        load(overrides=["model_name=runs/new"])


@pytest.mark.parametrize("option", ["compact", "zero_shot"])
def test_a_folder_of_the_small_policy_is_asked_as_it_was_taught(tmp_path: Path, option: str) -> None:
    facts = {"options": {"prompt_option": option, "backend": "cuda-nvrtc"}}
    (tmp_path / MADE).write_text(json.dumps(facts))
    config = load(overrides=[f"model_name={tmp_path}"])
    assert (config.prompt_option, config.backend) == (option, "cuda-nvrtc")
    own = load(overrides=[f"model_name={tmp_path}", "prompt.option=one_shot", "backend=c"])
    assert (own.prompt_option, own.backend) == ("one_shot", "c"), "what is said oneself wins"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"options": 3}', '{"options": {"prompt_option": null, "backend": 1}}']
)
def test_a_file_that_says_nothing_of_teaching_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / MADE).write_text(text)
    assert load(overrides=[f"model_name={tmp_path}"]) == Config(model_name=str(tmp_path))


def test_a_model_s_folder_is_no_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = load(overrides=["model_name=model"])
    assert config == msgspec.structs.replace(Config(model_name="model"), learner=config.learner)


def learns(*words: str) -> tuple[int, int, float, bool]:
    learner = load(overrides=words).learner
    return learner.epochs, learner.minibatches, learner.negative_scale, learner.scale_advantages


SMALLS, WHOLE = (2, 2, 0.3, True), (1, 1, 1.0, False)


def test_what_suits_a_small_policy_does_not_reach_a_real_model(run: Path) -> None:
    assert (learns(), learns("model_name=small"), learns("model_name=runs/mine")) == (SMALLS, SMALLS, SMALLS)
    assert learns("model_name=owner/name") == learns("model_name=owner/name", "preset=kevin") == WHOLE
    assert learns("model_name=owner/name", "learner.minibatches=4") == (1, 4, 1.0, False), "what is said oneself wins"


def test_what_was_trained_from_a_real_model_is_none_of_ours(run: Path) -> None:
    make_run(run.parent / "theirs", 0, words=["model_name=owner/name"])
    assert learns("model_name=runs/theirs") == WHOLE
    make_run(run.parent / "second", 0, words=["model_name=runs/mine"])
    assert learns("model_name=runs/second") == SMALLS
