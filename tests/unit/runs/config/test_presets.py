"""Named algorithms: valid, complete, and below whatever the user sets."""

from __future__ import annotations

from typing import get_args

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.learning.settings import check_combination
from kbrl_async.rollouts.settings import ADVANTAGES
from kbrl_async.runs.config import load
from kbrl_async.runs.config.presets import METHODS, PRESETS
from kbrl_async.runs.config.schema import PresetName


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    config = load(overrides=[f"preset={name}"])
    check_combination(config.loss, config.corrections)
    assert config.preset == name


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_valid_configuration(name: str) -> None:
    config = load(overrides=[f"method={name}"])
    check_combination(config.loss, config.corrections)
    assert (ADVANTAGES.knows(config.advantage), config.method) == (True, name)


def test_the_schema_names_exactly_the_presets_that_exist() -> None:
    assert set(get_args(PresetName)) == set(PRESETS)


def test_a_key_that_is_set_wins_over_the_preset_wherever_it_stands() -> None:
    assert load(overrides=["advantage=mean", "preset=grpo"]).advantage == "mean"
    assert load(overrides=["preset=grpo"], env={"KBRL_LEARNER__CLIP_HIGH": "0.5"}).learner.clip_high == 0.5


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="dr_grpo"):
        load(overrides=["preset=drgrpo"])


def test_a_weight_beside_a_loss_that_weighs_is_refused() -> None:
    with pytest.raises(ConfigError, match="again"):
        load(overrides=["corrections=tis"])
    assert load(overrides=["loss=reinforce", "corrections=tis,veto"]).corrections == ["tis", "veto"]


def test_a_divergence_needs_its_weight() -> None:
    with pytest.raises(ConfigError, match="go together"):
        load(overrides=["learner.kl=k3"])
