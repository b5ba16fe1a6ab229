"""Which policy writes, with which configuration; and the examples that it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import UserError
from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.optimize.engine import examples, in_words, resolve
from kbrl_async.lab.small_policy import making
from kbrl_async.lab.small_policy.configured import small_options
from kbrl_async.rollouts.settings import Prompt
from kbrl_async.runs.config import Config, load, to_yaml
from kbrl_async.runs.targets import Target


@pytest.fixture(autouse=True)
def _plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_small_policy_that_a_run_has_made_is_used_from_the_cache(tmp_path: Path) -> None:
    cache = f"cache_path={tmp_path}"
    assert resolve("", "newest", [], [cache])[1].mode == "multi_turn", "nothing is made yet: the one that can refine"
    for mode in ("single_turn", "multi_turn"):
        made = making.place_of(tmp_path, small_options(load(overrides=[f"mode={mode}"])))
        made.mkdir()
        (made / making.MADE).touch()
        assert resolve("", "newest", [], [cache])[1].mode == mode


def test_the_default_is_the_small_policy_made_with_turns() -> None:
    policy, config = resolve("", "newest", [], [])
    assert (policy.kind, policy.name) == ("model", "small")
    assert (config.mode, config.prompt_option) == ("multi_turn", "compact")
    assert resolve("", "newest", [], ["mode=single_turn"])[1].mode == "single_turn"


def test_a_model_named_in_the_configuration_is_taken() -> None:
    policy, config = resolve("", "newest", [], ["model_name=owner/name", "max_tokens=999"])
    assert (policy.name, config.prompt_option, config.max_tokens) == ("owner/name", "zero_shot", 999)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("http://host/v1", ["model_name=m"]),
        ("", ["sampler.engine=openai", "sampler.base_url=http://host/v1", "model_name=m"]),
    ],
)
def test_an_endpoint_is_a_policy_too(policy: str, words: list[str]) -> None:
    found, config = resolve(policy, "newest", [], words)
    assert (found.kind, found.name) == ("endpoint", "http://host/v1")
    assert (config.sampler.engine, config.sampler.base_url, config.model_name) == ("openai", "http://host/v1", "m")


def test_a_model_folder_without_a_run_keeps_the_users_settings(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text(to_yaml(Config(temperature=0.7)).replace("mode: single_turn\n", ""))
    policy, config = resolve("model", "newest", [tmp_path / "mine.yaml"], [])
    assert (policy.kind, config.temperature) == ("model", 0.7)


def test_examples_from_nowhere_are_refused() -> None:
    problem = next(p for p in load_suite() if p.problem_id == "L1/13_softmax")
    with pytest.raises(UserError, match="--examples nowhere is no folder"):
        examples("nowhere", problem, "c", Prompt())


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Target("policy", "runs/x/policies/policy-v14", "x-v14", "runs/x", 14), "policy x at version 14"),
        (Target("checkpoint", "mine/step-000003", "mine-step3", None, 3), "policy mine at version 3"),
        (Target("model", "small", "small"), "policy small at version 0, before any training with rewards"),
        (Target("model", "owner/name", "owner-name"), "model owner/name"),
        (Target("adapter", "folder/one", "one"), "adapter folder/one"),
    ],
)
def test_the_author_is_a_policy_with_its_version(policy: Target, words: str) -> None:
    assert in_words(policy) == words
