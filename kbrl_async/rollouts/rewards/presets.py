"""Reward presets: data over `RewardParts`, not code. Adding one is one entry of `PRESETS`.

::

    reward = floor                                   when it cheats
           = value of the first rung not passed      where the preset has a ladder
           = gate · Σ weight[part] · part            else

Weights pay for each part on its own: a kernel that compiles and is wrong still earns its `compile` weight.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.rewards.parts import PART_NAMES, RewardParts
from protocols.records import Fault

PLAN_WEIGHT = 0.1
"""Of a plan part that is named without a weight (TritonRL's α)."""


class Rung(msgspec.Struct, frozen=True):
    """A stage that must be passed (its part is 1) and the whole reward of failing it."""

    part: str
    otherwise: float


class Preset(msgspec.Struct, frozen=True):
    weights: dict[str, float]
    ladder: tuple[Rung, ...] = ()
    gate: str = ""
    """A part that multiplies the sum; empty for none."""
    floor: float = 0.0
    """What cheating gets: never above any honest reward."""
    plan_part: str = ""
    """What the tokens around the kernel are paid by, on their own and behind the same gate; empty: as all tokens."""
    plan_weight: float = 0.0
    """Weight of their advantage beside 1 of the kernel's tokens."""


PRESETS: dict[str, Preset] = {
    "stage1": Preset({"format": 0.3, "compile": 0.5, "correctness": 0.2}),
    "stage2": Preset({"format": 0.1, "compile": 0.2, "correctness": 0.7}),
    "stage3": Preset({"format": 0.05, "compile": 0.1, "correctness": 0.5, "speed": 0.35}),
    # Kevin (Baronio et al. 2025): .3·correct + speedup, cap 10.
    "kevin": Preset({"correct": 0.3, "speedup": 1.0}),
    "kevin_offset": Preset({"correct": 0.3, "speedup_gain": 1.0}),
    "hierarchical": Preset({"correct": 0.7, "speed": 0.3}, gate="valid"),
    # TritonRL (Woo et al. 2025): the plan by the speedup it leads to, the code by its correctness, α = .1.
    "plan_code": Preset({"correct": 1.0}, gate="valid", plan_part="speedup", plan_weight=0.1),
    "funnel": Preset(
        {"correct": 0.7, "speed": 0.3},
        ladder=(Rung("format", 0.0), Rung("compile", 0.3), Rung("correct", 0.5)),
    ),
    "fork": Preset(
        {"correctness": 0.3, "speed": 1.0},
        ladder=(Rung("format", -2.0), Rung("compile", -1.0)),
        floor=-2.0,
    ),
}


def find_preset(name: str, weights: Mapping[str, float] | None = None) -> Preset:
    """The preset `name`, with single weights overridden; ConfigError names the nearest right key."""
    if name not in PRESETS:
        raise ConfigError(f"unknown reward preset {name!r}", f"Known ones: {', '.join(PRESETS)}")
    for part in weights or {}:
        if part not in PART_NAMES:
            near = difflib.get_close_matches(part, PART_NAMES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known ones: {', '.join(PART_NAMES)}"
            raise ConfigError(f"unknown reward part {part!r}", hint)
    preset = PRESETS[name]
    return msgspec.structs.replace(preset, weights={**preset.weights, **(weights or {})})


def with_plan(preset: Preset, part: str | None, weight: float | None) -> Preset:
    """The preset with another plan part or weight; None leaves the preset's.

    :raises ConfigError: a weight for no part.
    """
    found = msgspec.structs.replace(
        preset,
        plan_part=preset.plan_part if part is None else part,
        plan_weight=preset.plan_weight if weight is None else weight,
    )
    if part is not None and weight is None and not preset.plan_weight:
        return msgspec.structs.replace(found, plan_weight=PLAN_WEIGHT)
    if found.plan_weight and not found.plan_part:
        cure = "Add dataset_builder.reward_plan_part=speed, or use dataset_builder.reward_preset=plan_code"
        raise ConfigError(f"dataset_builder.reward_plan_weight={weight:g} weighs no part", cure)
    return found


def plan_reward_of(parts: RewardParts, preset: Preset) -> float:
    """What the tokens around the kernel of one turn earn; 0 where they earn nothing of their own."""
    if not preset.plan_part or parts.fault is Fault.CHEATING:
        return 0.0
    return _part(parts, preset.plan_part) * (_part(parts, preset.gate) if preset.gate else 1.0)


def reward_of(parts: RewardParts, preset: Preset) -> float:
    """One number for one turn."""
    if parts.fault is Fault.CHEATING:
        return preset.floor
    for rung in preset.ladder:
        if _part(parts, rung.part) < 1.0:
            return rung.otherwise
    total = sum(weight * _part(parts, name) for name, weight in preset.weights.items())
    return total * _part(parts, preset.gate) if preset.gate else total


def _part(parts: RewardParts, name: str) -> float:
    value: float = getattr(parts, name)
    return value
