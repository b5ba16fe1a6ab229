"""Token log-probs and entropies of packed sequences, at the sampler's temperature, in fp32.

Invariants
* The one formula that sampler and learner share: `log_softmax(float32(logits) / temperature)`. Anything else makes the
  importance ratio of an unchanged policy differ from 1.
* Logits of more than `chunk_elements` values never exist at once: hidden states go through the head in chunks of
  tokens, recomputed in the backward pass.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from kbrl_async.learning.packing import Microbatch

CHUNK_ELEMENTS = 1 << 24
Head = Callable[[torch.Tensor], torch.Tensor]


def token_logprobs(
    hidden_TH: torch.Tensor,
    head: Head,
    target_T: torch.Tensor,
    temperature: float,
    vocabulary: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [T] with gradient and entropy [T] without, both of softmax(head(hidden) / temperature)."""
    chunk = max(1, chunk_elements // vocabulary)
    if len(target_T) <= chunk:
        return _chunk_logprobs(hidden_TH, head, target_T, temperature)
    parts = [
        checkpoint(_chunk_logprobs, h, head, y, temperature, use_reentrant=False)
        for h, y in zip(torch.split(hidden_TH, chunk), torch.split(target_T, chunk), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk_logprobs(
    hidden_TH: torch.Tensor, head: Head, target_T: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp_TV = torch.log_softmax(head(hidden_TH).float() / temperature, dim=-1)
    with torch.no_grad():
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_TV.gather(-1, target_T[:, None]).squeeze(-1), entropy_T


def hidden_states(causal_lm: torch.nn.Module, batch: Microbatch) -> torch.Tensor:
    """Hidden states [T, H] that predict the response tokens of `batch`."""
    decoder = causal_lm.get_decoder()  # type: ignore[operator]
    kwargs = {} if batch.mask_B1LL is None else {"position_ids": batch.position_BL}
    out = decoder(input_ids=batch.input_BL, attention_mask=batch.mask_B1LL, use_cache=False, **kwargs)
    hidden: torch.Tensor = out.last_hidden_state
    return hidden.flatten(0, 1)[batch.predict_T]


def batch_logprobs(
    causal_lm: torch.nn.Module, batch: Microbatch, temperature: float, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probs and entropies [T] of the response tokens of `batch` under the model at `temperature`."""
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]
    hidden_TH = hidden_states(causal_lm, batch)
    return token_logprobs(hidden_TH, head, batch.target_T, temperature, head.weight.shape[0], chunk_elements)


@torch.no_grad()
def sequence_logprobs(causal_lm: torch.nn.Module, ids: list[int]) -> list[float]:
    """log p(ids[i] | ids[:i]) for i ≥ 1 at temperature 1, fp32: what a canary compares (I8)."""
    device = next(causal_lm.parameters()).device
    input_1L = torch.tensor([ids], device=device)
    hidden_1LH = causal_lm.get_decoder()(input_ids=input_1L, use_cache=False).last_hidden_state  # type: ignore[operator]
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]
    logp_T, _ = token_logprobs(hidden_1LH[0, :-1], head, input_1L[0, 1:], 1.0, head.weight.shape[0])
    values: list[float] = logp_T.tolist()
    return values
