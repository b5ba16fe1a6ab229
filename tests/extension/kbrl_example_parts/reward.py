"""A reward part and a preset that pays for it: `reward.preset=kbrl_example_parts.reward:TERSE`."""

from __future__ import annotations

from kbrl_async.rollouts.rewards.presets import Preset
from protocols.rollout import Record

TOKENS = 300


def terse(record: Record) -> float:
    """1 for an empty answer, 0 for one of `TOKENS` tokens, linear between; of answers of any worth."""
    assert record.generation is not None
    return max(0.0, 1.0 - len(record.generation.token_ids) / TOKENS)


TERSE = Preset({"correct": 1.0, "kbrl_example_parts.reward:terse": 1.0})
