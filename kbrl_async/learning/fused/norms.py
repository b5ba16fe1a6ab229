"""The norms over each head of q and of k that Qwen3 has between projection and rotation."""

# ruff: noqa: N815 - capital suffixes of names give tensor shapes: D depth of a head
from __future__ import annotations

from typing import Any, NamedTuple

import torch


class HeadNorms(NamedTuple):
    q_D: torch.Tensor
    k_D: torch.Tensor
    epsilon: float


def head_norms(attention: Any) -> HeadNorms | None:
    """Those of an attention module; None where it has none."""
    if not hasattr(attention, "q_norm"):
        return None
    q, k = attention.q_norm, attention.k_norm
    return HeadNorms(q.weight, k.weight, float(q.variance_epsilon))
