"""Named algorithms: valid, complete, and below whatever the user sets."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.learning.settings import check_combination
from kbrl_async.rollouts.settings import ADVANTAGES
from kbrl_async.runs.config import load
from kbrl_async.runs.config.presets import METHODS, PRESETS
from kbrl_async.runs.config.schema import PresetName

CONFIGS = Path(__file__).parents[4] / "configs"


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


def test_every_preset_of_another_algorithm_takes_advantages_as_they_are() -> None:
    learners = {name: load(overrides=[f"preset={name}"]).learner for name in PRESETS if name != "dppo_tv"}
    assert {name for name, of in learners.items() if of.negative_scale != 1 or of.scale_advantages} == set()


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


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_that_we_ship_is_one(path: Path) -> None:
    load([path])


def test_recipes_of_others_have_their_constants() -> None:
    kevin, doctor = (load([CONFIGS / f"kernelbench_{name}.yaml"]) for name in ("kevin_32b", "dr_kernel"))
    assert (kevin.gamma, kevin.turns.returns, kevin.turns.stop, kevin.split) == (0.4, "sum", "never", "kevin")
    assert kevin.reward.preset == "kevin"
    assert (doctor.reward.coverage_weight, doctor.reward.least_coverage) == (0.5, 0.3)
    assert (doctor.loss, doctor.advantage) == ("reinforce", "leave_one_out")


def test_kevin_and_retrieved_examples_are_ready_alone_and_together() -> None:
    raicl, kevin, both = (load([CONFIGS / f"kernelbench_{name}.yaml"]) for name in ("raicl", "kevin", "kevin_raicl"))
    assert (raicl.prompt.option, raicl.mode) == ("raicl", "single_turn")
    assert (kevin.prompt.option, kevin.mode) == ("auto", "multi_turn")
    assert both == msgspec.structs.replace(kevin, prompt=raicl.prompt, name=both.name)
