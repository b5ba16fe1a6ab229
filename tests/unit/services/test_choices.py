"""Every choice that the configuration offers is one that the rooms below know."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from kbrl_async.kernels.backends import backend, backends
from kbrl_async.learning.settings import CORRECTIONS, LOSSES
from kbrl_async.rollouts.prompts import TEMPLATES
from kbrl_async.rollouts.rewards.advantages import find_baseline
from kbrl_async.rollouts.rewards.presets import find_presets
from kbrl_async.rollouts.settings import ADVANTAGES, REWARD_PARTS, REWARD_PRESETS, BestOfN, Prompt, Reward


def choices(struct: type[Any], field: str) -> list[str]:
    return list(get_args(get_type_hints(struct, include_extras=True)[field]))


@pytest.mark.parametrize("name", LOSSES.ours)
def test_every_loss_can_be_found(name: str) -> None:
    assert callable(LOSSES.load(name))


@pytest.mark.parametrize("name", CORRECTIONS.ours)
def test_every_correction_can_be_found(name: str) -> None:
    assert callable(CORRECTIONS.load(name))


@pytest.mark.parametrize("name", ADVANTAGES.ours)
def test_every_baseline_can_be_found(name: str) -> None:
    assert callable(find_baseline(name, BestOfN()))


@pytest.mark.parametrize("name", REWARD_PRESETS.ours)
def test_every_reward_preset_can_be_found(name: str) -> None:
    assert all(preset.weights for preset in find_presets(Reward(preset=name)))


@pytest.mark.parametrize("name", REWARD_PARTS.ours)
def test_every_reward_part_can_be_found(name: str) -> None:
    assert callable(REWARD_PARTS.load(name))


def test_every_prompt_option_is_a_template() -> None:
    assert set(choices(Prompt, "option")) - {"auto", "raicl", "custom"} == set(TEMPLATES)


@pytest.mark.parametrize("name", backends())
def test_every_backend_can_be_found_and_is_told_of(name: str) -> None:
    found = backend(name)
    assert found.name == name
    assert found.contracts[""].startswith("You write fast")
