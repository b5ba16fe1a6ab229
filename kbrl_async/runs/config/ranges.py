"""The types of the keys: each holds its range, or the names that it takes."""

from __future__ import annotations

from typing import Literal

from kbrl_async.ranges import AtLeastOne, Count, Fraction, NonNegative, Positive

__all__ = ["AtLeastOne", "Count", "Fraction", "NonNegative", "Positive"]

Cores = Literal["auto"] | list[Count]

PresetName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce", "ppo", "gspo", "cispo", "dppo_tv", "decoupled", "a3po", "tis"
]
