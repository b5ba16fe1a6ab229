"""The types of the keys: each holds its range, or the names that it takes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

AtLeastOne = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Cores = Literal["auto"] | list[Count]

RewardName = Literal[
    "auto", "stage1", "stage2", "stage3", "kevin", "kevin_offset", "hierarchical", "plan_code", "funnel", "fork"
]
PresetName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce", "ppo", "gspo", "cispo", "dppo_tv", "decoupled", "a3po", "tis"
]
CorrectionName = Literal[
    "tis", "tis_sequence", "icepop", "sequence_mask", "geometric_mask", "k3_reject", "veto", "opsm", "m2po"
]
AlarmAction = Literal["warn", "pause_admission", "lower_staleness", "stop"]
