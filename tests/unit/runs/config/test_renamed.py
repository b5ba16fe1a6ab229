"""Keys that were renamed are read for one release, each with a line that names the new one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import KEYS, Config, config_hash, load
from kbrl_async.runs.config.keys import flat
from kbrl_async.runs.config.loading import CHANGEABLE, warn_once
from kbrl_async.runs.config.names import RENAMED
from kbrl_async.runs.folder import load_run, plan, prepare

NOT_DEFAULT: dict[str, Any] = {
    "prompt.option": "zero_shot", "prompt.hardware": False, "prompt.chat_template": "on", "prompt.thinking": "off",
    "prompt.examples": 7, "prompt.max_tokens": 900, "prompt.live_examples": 11, "reward.preset": "stage2",
    "reward.format_weight": 0.1, "reward.compile_weight": 0.2, "reward.correctness_weight": 0.3,
    "reward.speed_weight": 0.4, "reward.plan_part": "speed", "reward.plan_weight": 0.2,
}  # fmt: skip
RAICL = {"prompt.option": "raicl", "prompt.index": "index"}
CUSTOM = {"prompt.option": "custom", "prompt.file": "own.toml"}
OLD = {new: old for old, new in RENAMED.items()}


@pytest.fixture(autouse=True)
def nothing_said_before() -> None:
    warn_once.cache_clear()


def by_old_names(config: Config) -> str:
    """`config` as the last release wrote it into a run folder."""
    tree = msgspec.to_builtins(config)
    tree["dataset_builder"] = {
        old.partition(".")[2]: tree[new.partition(".")[0]][new.partition(".")[2]] for old, new in RENAMED.items()
    }
    del tree["prompt"], tree["reward"]
    return yaml.safe_dump(tree)


def warned(text: str) -> list[str]:
    """The keys that the lines on stderr are about."""
    assert all(line.startswith("warning: ") for line in text.splitlines())
    return [line.split()[1] for line in text.splitlines()]


def test_every_old_key_stands_for_one_of_today() -> None:
    added = {"prompt.base", "prompt.embedder", "reward.observed_speedup", "reward.unproven"}
    added |= {"reward.least_coverage", "reward.coverage_weight", "reward.above_1_weight"}
    assert set(RENAMED.values()) == {name for name in KEYS if name.startswith(("prompt.", "reward."))} - added
    assert not set(RENAMED) & set(KEYS)
    assert len(set(RENAMED.values())) == len(RENAMED)
    assert set(NOT_DEFAULT) | set(RAICL) | set(CUSTOM) == set(OLD)


@pytest.mark.parametrize("values", [NOT_DEFAULT, RAICL, CUSTOM], ids=["plain", "raicl", "custom"])
@pytest.mark.parametrize("source", ["file", "variable", "command line"])
def test_an_old_key_is_read_and_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, values: dict[str, Any]
) -> None:
    file, words, env = tmp_path / "mine.yaml", [f"{OLD[new]}={value}" for new, value in values.items()], {}
    if source == "file":
        leaves = {OLD[new].partition(".")[2]: value for new, value in values.items()}
        file.write_text(yaml.safe_dump({"dataset_builder": leaves}))
        words = []
    elif source == "variable":
        env = {f"KBRL_{OLD[new].upper().replace('.', '__')}": str(value) for new, value in values.items()}
        words = []
    for _ in range(2):
        found = flat(load([file] if source == "file" else [], words, env))
    assert {new: found[new] for new in values} == values
    said = capsys.readouterr().err
    assert sorted(warned(said)) == sorted(OLD[new] for new in values)
    for new in values:
        assert f"{OLD[new]} is {new} now;" in said


def test_the_new_names_are_read_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    load(overrides=[f"{new}={value}" for new, value in NOT_DEFAULT.items()])
    assert capsys.readouterr().err == ""


def test_what_is_wrong_under_an_old_name_is_named_by_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"prompt\.examples must be an integer ≥ 1"):
        load(overrides=["dataset_builder.raicl_k=0"])
    with pytest.raises(ConfigError, match=r"Did you mean reward\.preset"):
        load(overrides=["reward_preset=stage2"])


def test_a_run_that_was_begun_by_old_names_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"log_path={tmp_path}", "name=mine", *(f"{new}={value}" for new, value in NOT_DEFAULT.items())]
    begun = prepare(load(overrides=asked))
    (begun.path / "config.yaml").write_text(by_old_names(begun.config))
    assert load_run(begun.path) == begun.config
    for todo in (plan(load(overrides=[f"resume={begun.path}"])), plan(load(overrides=asked))):
        assert todo.resumed
        assert todo.config == begun.config
    assert sorted(set(warned(capsys.readouterr().err))) == sorted(RENAMED)
    with pytest.raises(ConfigError, match=r"reward\.speed_weight=0\.4, not 0\.9"):
        plan(load(overrides=[*asked, "reward.speed_weight=0.9"]))
    prepare(load(overrides=asked))
    assert "dataset_builder" not in (begun.path / "config.yaml").read_text()


def test_an_experiment_keeps_its_hash_while_old_names_are_read() -> None:
    """An evaluation that was begun before is found again by it."""
    config = load(overrides=["reward.preset=stage2"])
    before = {OLD.get(key, key): value for key, value in flat(config).items() if key not in CHANGEABLE}
    whole = msgspec.json.encode(before, order="deterministic")
    assert config_hash(config) == hashlib.sha256(whole).hexdigest()[:12] != config_hash(Config())
