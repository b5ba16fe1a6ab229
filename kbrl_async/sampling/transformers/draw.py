"""Drawing tokens: temperature, optional nucleus, inverse-CDF sampling, and the log-prob of what was drawn.

The log-prob is `log_softmax(float32(logits) / temperature)`, exactly what the learner computes. Suffixes: N rows,
V vocabulary.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import torch


def draw(
    logits_NV: torch.Tensor, temperature_N: torch.Tensor, uniform_N: torch.Tensor, top_p_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob. `uniform_N` in [0, 1) is the randomness; temperature 0 is greedy.

    A greedy row's log-prob is that at temperature 1. With `top_p_N` the log-prob is under the truncated distribution.
    """
    greedy_N = temperature_N <= 0
    scale_N = torch.where(greedy_N, torch.ones_like(temperature_N), temperature_N)
    logp_NV = torch.log_softmax(logits_NV.float() / scale_N[:, None], dim=-1)
    if top_p_N is not None:
        logp_NV = _nucleus(logp_NV, top_p_N)
    cdf_NV = logp_NV.exp().cumsum(-1)
    # Scaled by the rounded total, so that u → 1 can't fall behind the last token; right=True never picks probability 0.
    point_N1 = (uniform_N * cdf_NV[:, -1])[:, None]
    drawn_N = torch.searchsorted(cdf_NV, point_N1, right=True).squeeze(-1).clamp(max=logits_NV.shape[-1] - 1)
    token_N = torch.where(greedy_N, logp_NV.argmax(-1), drawn_N)
    return token_N, logp_NV.gather(-1, token_N[:, None]).squeeze(-1)


def _nucleus(logp_NV: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """Renormalised log-probs of the smallest set of tokens whose mass reaches top_p (Holtzman et al. 2019)."""
    ordered_NV, index_NV = logp_NV.sort(dim=-1, descending=True)
    before_NV = ordered_NV.exp().cumsum(-1) - ordered_NV.exp()
    kept_NV = ordered_NV.masked_fill(before_NV >= top_p_N[:, None], float("-inf"))
    return torch.log_softmax(torch.empty_like(logp_NV).scatter_(-1, index_NV, kept_NV), dim=-1)
