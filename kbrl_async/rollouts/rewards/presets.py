"""Reward presets: data over reward parts, not code. Adding one is one constant here and its name in
`settings.REWARD_PRESETS`; a user's own is named as `package.module:object`.

::

    reward = floor                                   when it cheats
           = floor + unproven_share · (as if right − floor) when nothing shows whose work it is
           = what a wrong one earns                  when its own kernels do less than `idle_below` of the work
           = value of the first rung not passed      where the preset has a ladder
           = gate · Σ weight[part] · part            else

Weights pay for each part on its own: a kernel that compiles and is wrong still earns its `compile` weight.
"""

from __future__ import annotations

import difflib
import math

import msgspec

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.rewards.parts import length, part_of
from kbrl_async.rollouts.settings import REWARD_PARTS, REWARD_PRESETS, Reward
from protocols.records import OBSERVED, Fault
from protocols.rollout import Record

SHARE_NOISE = 0.05
"""Own shares of the device time that are no further apart count as equal. It is a bound that was set, not measured."""
PLAN_WEIGHT = 0.1
"""Of a plan part that is named without a weight (TritonRL's α)."""


class Rung(msgspec.Struct, frozen=True):
    """A stage that must be passed (its part is 1) and the whole reward of failing it."""

    part: str
    otherwise: float


class Preset(msgspec.Struct, frozen=True):
    weights: dict[str, float]
    """By part: a name of ours, or `package.module:object`."""
    ladder: tuple[Rung, ...] = ()
    gate: str = ""
    """A part that multiplies the sum; empty for none."""
    floor: float = 0.0
    """What cheating gets: never above any honest reward."""
    plan_part: str = ""
    """What the tokens around the kernel are paid by, on their own and behind the same gate; empty: as all tokens."""
    plan_weight: float = 0.0
    """Weight of their advantage beside 1 of the kernel's tokens."""
    observed_speedup: float | None = None
    """Most speedup that is paid where a verdict is observed; None: as much as was measured."""
    overlong: bool = False
    """Take off up to 1 over the last fifth of max_tokens, 1 from an answer that was cut (DAPO's soft punishment)."""
    idle_below: float = 0.0
    """Own share of the device time below which a correct kernel is paid as a wrong one that compiled."""
    unproven_share: float = 0.0
    """Share of the way from `floor` to what a right kernel without a time gets, for one that is `UNPROVEN`."""


STAGE1 = Preset({"format": 0.3, "compile": 0.5, "correctness": 0.2})
STAGE2 = Preset({"format": 0.1, "compile": 0.2, "correctness": 0.7})
STAGE3 = Preset({"format": 0.05, "compile": 0.1, "correctness": 0.5, "speed": 0.35})
AUTO = (STAGE1, STAGE2, STAGE3)
"""By the stage of the curriculum."""
KEVIN = Preset({"correct": 0.3, "speedup": 1.0})
"""Kevin (Baronio et al. 2025): .3·correct + speedup, cap 10."""
KEVIN_OFFSET = Preset({"correct": 0.3, "speedup_gain": 1.0})
HIERARCHICAL = Preset({"correct": 0.7, "speed": 0.3}, gate="valid")
HIERARCHICAL_RAW = Preset({"correct": 0.7, "speedup": 0.3}, gate="valid")
"""The same with the raw speedup, as the fusion notes have it."""
CORRECT = Preset({"correct": 1.0})
BEST_OF_N = Preset({"correct": 1.0, "speedup": 0.3}, gate="correct")
"""What imitation ranks by: correct + .3·speedup, and nothing for what is wrong, however many sets it passes."""
PLAN_CODE = Preset({"correct": 1.0}, gate="valid", plan_part="speedup", plan_weight=0.1)
"""TritonRL (Woo et al. 2025): the plan by the speedup it leads to, the code by its correctness, α = .1."""
FUNNEL = Preset(
    {"correct": 0.7, "speed": 0.3},
    ladder=(Rung("format", 0.0), Rung("compile", 0.3), Rung("correct", 0.5)),
)
FORK = Preset(
    {"correctness": 0.3, "speed": 1.0},
    ladder=(Rung("format", -2.0), Rung("compile", -1.0)),
    floor=-2.0,
)


def find_presets(settings: Reward, *, overlong: bool = False) -> list[Preset]:
    """The preset that the settings name and change: one, or one for each stage of the curriculum. `overlong`: answers
    near max_tokens are punished.

    :raises UserError: nothing has that name.
    :raises ConfigError: it is no preset, has a part that is none, or a plan weight without a plan part.
    """
    found = REWARD_PRESETS.load(settings.preset)
    stages = list(found) if isinstance(found, tuple) else [found]
    if len(stages) not in (1, len(AUTO)) or not all(isinstance(stage, Preset) for stage in stages):
        cause = f"reward.preset={settings.preset} is no Preset, and no tuple of {len(AUTO)}"
        raise ConfigError(cause, "Give a kbrl_async.rollouts.rewards.presets.Preset, see docs/howto-reward.md")
    return [msgspec.structs.replace(_changed(stage, settings), overlong=overlong) for stage in stages]


def _changed(preset: Preset, settings: Reward) -> Preset:
    weights = {**preset.weights, **settings.weights}
    part, weight = settings.plan_part, settings.plan_weight
    changed = Preset(
        weights,
        preset.ladder,
        preset.gate,
        preset.floor,
        preset.plan_part if part is None else part,
        weight if weight is not None else preset.plan_weight or (PLAN_WEIGHT if part is not None else 0.0),
        observed_speedup=settings.observed_speedup,
        idle_below=settings.least_coverage,
        unproven_share=settings.unproven,
    )
    named = [*weights, *(rung.part for rung in preset.ladder), preset.gate, changed.plan_part]
    for name in filter(None, named):
        if not REWARD_PARTS.knows(name):
            near = difflib.get_close_matches(name, REWARD_PARTS.names(), n=1)
            known = ", ".join(REWARD_PARTS.names())
            raise ConfigError(
                f"unknown reward part {name!r}", f"Did you mean {near[0]!r}?" if near else f"Known ones: {known}"
            )
    if changed.plan_weight and not changed.plan_part:
        cure = "Add reward.plan_part=speed, or use reward.preset=plan_code"
        raise ConfigError(f"reward.plan_weight={changed.plan_weight:g} weighs no part", cure)
    return changed


def plan_reward_of(record: Record, preset: Preset) -> float:
    """What the tokens around the kernel of one turn earn; 0 where they earn nothing of their own."""
    if not preset.plan_part:
        return 0.0
    record = _capped(record, preset)
    return part_of(record, preset.plan_part) * (part_of(record, preset.gate) if preset.gate else 1.0)


def reward_of(record: Record, preset: Preset) -> float:
    """One number for one turn whose record earns one."""
    punished = 1.0 - length(record) if preset.overlong else 0.0
    return _paid(record, preset) - punished


def spread_of(record: Record, preset: Preset) -> float:
    """How much more the turn would earn at the upper end of its speedup's interval, and of what its own share of the
    time may be: what measuring leaves open (I7)."""
    return max(0.0, _paid(_at_best(record), preset) - _paid(record, preset))


def plan_spread_of(record: Record, preset: Preset) -> float:
    """The same of the tokens around the kernel."""
    return max(0.0, plan_reward_of(_at_best(record), preset) - plan_reward_of(record, preset))


def _at_best(record: Record) -> Record:
    if record.bench is None:
        return record
    timing, verdict = record.timing, record.verdict
    if timing is not None and math.isfinite(timing.hi):
        timing = msgspec.structs.replace(timing, lo=max(timing.lo, timing.hi))
    if verdict.own_share is not None:
        verdict = msgspec.structs.replace(verdict, own_share=min(1.0, verdict.own_share + SHARE_NOISE))
    return msgspec.structs.replace(record, bench=msgspec.structs.replace(record.bench, timing=timing, verdict=verdict))


def _paid(record: Record, preset: Preset) -> float:
    if record.fault is Fault.CHEATING:
        return preset.floor
    if record.fault is Fault.UNPROVEN:
        return preset.floor + preset.unproven_share * (_earned(_as_right(record), preset) - preset.floor)
    if _is_idle(record, preset):
        return _earned(_as_wrong(record), preset)
    return _earned(_capped(record, preset), preset)


def _is_idle(record: Record, preset: Preset) -> bool:
    """Its own kernels do too little of the work. Where their share is not known, nothing is held against it."""
    share = record.verdict.own_share if record.bench is not None else None
    return record.fault is Fault.OK and share is not None and share < preset.idle_below


def _as_wrong(record: Record) -> Record:
    """As if it had passed no set: what format and compilation earn stays."""
    assert record.bench is not None, "only a bench measures a share"
    verdict = msgspec.structs.replace(record.verdict, fault=Fault.INCORRECT, passed=0, near=0)
    return msgspec.structs.replace(record, bench=msgspec.structs.replace(record.bench, verdict=verdict, timing=None))


def _earned(record: Record, preset: Preset) -> float:
    for rung in preset.ladder:
        if part_of(record, rung.part) < 1.0:
            return rung.otherwise
    total = sum(weight * part_of(record, name) for name, weight in preset.weights.items())
    return total * part_of(record, preset.gate) if preset.gate else total


def _capped(record: Record, preset: Preset) -> Record:
    """Its time as it is paid: of what was only observed no more than the preset allows."""
    timing, most = record.timing, preset.observed_speedup
    if record.bench is None or timing is None or most is None or record.verdict.trust != OBSERVED:
        return record
    lower = msgspec.structs.replace(timing, lo=min(timing.lo, most), speedup=min(timing.speedup, most))
    return msgspec.structs.replace(record, bench=msgspec.structs.replace(record.bench, timing=lower))


def _as_right(record: Record) -> Record:
    assert record.bench is not None, "only a bench calls a kernel unproven"
    verdict = msgspec.structs.replace(record.verdict, fault=Fault.OK)
    return msgspec.structs.replace(record, bench=msgspec.structs.replace(record.bench, verdict=verdict, timing=None))
