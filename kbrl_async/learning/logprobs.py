"""Token log-probs and entropies of packed sequences, at the sampler's temperature, in fp32.

Invariants
* The one formula that sampler and learner share: `log_softmax(float32(logits) / temperature)`. Anything else makes the
  importance ratio of an unchanged policy differ from 1.
* Logits of more than `chunk_elements` values never exist at once: hidden states go through the head in chunks of
  tokens. A head that is trained is computed again in the backward pass; for a frozen one (LoRA) d log p / d hidden is
  known in the forward pass already, up to a factor a token, and is kept instead.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch

from kbrl_async.learning.fused.elementwise import softmax_scores
from kbrl_async.learning.packing import Microbatch
from kbrl_async.learning.recompute import again

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
    if _is_frozen(head):
        scores: tuple[torch.Tensor, torch.Tensor] = _FrozenHead.apply(  # type: ignore[no-untyped-call]
            hidden_TH, head.weight, target_T, temperature, chunk
        )
        return scores
    if len(target_T) <= chunk:
        return _chunk_logprobs(hidden_TH, head, target_T, temperature)
    parts = [
        again(_chunk_logprobs, h, head, y, temperature)
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


def _is_frozen(head: Head) -> TypeGuard[torch.nn.Linear]:
    return type(head) is torch.nn.Linear and head.bias is None and not head.weight.requires_grad


class _FrozenHead(torch.autograd.Function):
    """log p(target) and entropy, chunk by chunk; keeps d log p/d hidden [T, H] where a gradient is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_T: torch.Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = ctx.needs_input_grad[0]
        chosen, entropies, slopes = [], [], []
        for h_CH, y_C in zip(torch.split(hidden_TH, chunk), torch.split(target_T, chunk), strict=True):
            logits_CV = h_CH @ weight_VH.t()
            chosen_C, entropy_C = softmax_scores(logits_CV, y_C, temperature, needed)
            chosen.append(chosen_C)
            entropies.append(entropy_C)
            if needed:
                slopes.append(logits_CV @ weight_VH)
        entropy_T = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_T)
        ctx.save_for_backward(*([torch.cat(slopes)] if needed else []))
        return torch.cat(chosen), entropy_T

    @staticmethod
    def backward(ctx: Any, gradient_T: torch.Tensor, _: torch.Tensor) -> Any:
        (slope_TH,) = ctx.saved_tensors
        return (gradient_T[:, None] * slope_TH).to(slope_TH.dtype), None, None, None, None


def hidden_states(causal_lm: torch.nn.Module, batch: Microbatch) -> torch.Tensor:
    """Hidden states [T, H] that predict the response tokens of `batch`."""
    decoder = causal_lm.get_decoder()  # type: ignore[operator]
    kwargs = {} if batch.mask_B1LL is None else {"position_ids": batch.position_BL}
    out = decoder(input_ids=batch.input_BL, attention_mask=batch.mask_B1LL, use_cache=False, **kwargs)
    hidden: torch.Tensor = out.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.predict_T)


def batch_logprobs(
    causal_lm: torch.nn.Module, batch: Microbatch, temperature: float, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probs and entropies [T] of the response tokens of `batch` under the model at `temperature`."""
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]
    hidden_TH = hidden_states(causal_lm, batch)
    return token_logprobs(hidden_TH, head, batch.target_T, temperature, head.weight.shape[0], chunk_elements)


@torch.no_grad()
@contextlib.contextmanager
def rounded_weights(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Each module of `model` computes with weights that are rounded to `dtype`, in the arithmetic of its own: a module
    at a time holds such a copy."""
    own: dict[torch.nn.Parameter, torch.Tensor] = {}

    def begin(module: torch.nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            own[parameter] = parameter.data
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)

    def end(module: torch.nn.Module, _: Any, __: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = own.pop(parameter)

    hooks = [
        hook for m in model.modules() for hook in (m.register_forward_pre_hook(begin), m.register_forward_hook(end))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in own.items():
            parameter.data = data


def sequence_logprobs(causal_lm: torch.nn.Module, ids: list[int]) -> list[float]:
    """log p(ids[i] | ids[:i]) for i ≥ 1 at temperature 1, fp32: what a canary compares (I8)."""
    device = next(causal_lm.parameters()).device
    input_1L = torch.tensor([ids], device=device)
    hidden_1LH = causal_lm.get_decoder()(input_ids=input_1L, use_cache=False).last_hidden_state  # type: ignore[operator]
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]
    logp_T, _ = token_logprobs(hidden_1LH[0, :-1], head, input_1L[0, 1:], 1.0, head.weight.shape[0])
    values: list[float] = logp_T.tolist()
    return values
