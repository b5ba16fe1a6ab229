"""What can be set of how weights travel from the learner to samplers. No torch here."""

from __future__ import annotations

from typing import Literal

import msgspec

from kbrl_async.ranges import Positive


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """How a new policy version reaches the samplers."""

    transport: Literal["auto", "files", "direct"] = "auto"
    """lora_rank=0: by files, or straight into the engine (NCCL, gloo on CPUs); auto: direct with placement=split."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number format of published full weights; auto: as the learner computes, float32 with engine=transformers."""
    address: str = "127.0.0.1"
    """transport=direct: the learner's address, as samplers reach it; weights travel unencrypted."""
    stalled_s: Positive = 30.0
    """transport=direct: seconds without progress after which a sampler is left to the files."""
