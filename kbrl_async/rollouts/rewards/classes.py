"""Classes of tokens: the kernel's own and those around it (thoughts, plan, comments) earn their own rewards. Pure.

::

    tokens      t t t t t t t  c c c c c c c c  t t        one span is the kernel, all others are the plan
    reward      ── plan part ─ ── the preset ── plan
    advantage   ─ α·A(plan) ── ─── A(code) ──── ─▶          each against the baseline of its own class

A sample whose kernel is not known (no code block, say) has one class: its advantage holds for all of its tokens.
Source: TritonRL (Woo et al. 2025): plan tokens by speedup, code tokens by correctness, mixed with α = .1, both gated
by validity.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.rollouts.rewards.advantages import Baseline
from protocols.records import TrainSample


def plan_advantages(samples: Sequence[TrainSample], baseline: Baseline) -> list[float]:
    """α·A of the plan's tokens of each sample of one group and turn; 0 where a sample has no plan.

    The baseline is taken over those that have one, and not asked where none has.
    """
    planned = [place for place, sample in enumerate(samples) if sample.has_plan]
    if not planned:
        return [0.0] * len(samples)
    found = baseline([samples[place].plan_reward for place in planned])
    by_place = dict(zip(planned, found, strict=True))
    return [sample.plan_weight * by_place.get(place, 0.0) for place, sample in enumerate(samples)]


def class_rewards(samples: Sequence[TrainSample]) -> list[list[float]]:
    """Rewards by class: what must differ within a group for it to teach anything."""
    plans = [sample.plan_reward for sample in samples if sample.has_plan]
    return [[sample.reward for sample in samples], *([plans] if plans else [])]
