"""The canary: proof that the weights which are served are those that the learner published (I8)."""

from __future__ import annotations

import torch

from kbrl_async.errors import PolicyMismatch
from protocols.records import PolicyVersion

TOLERANCE = {torch.float32: 1e-3}
"""Largest allowed |difference| of one log-prob by dtype; same arithmetic agrees to 1e-5 in fp32."""
TOLERANCE_DEFAULT = 2e-2


@torch.inference_mode()
def canary_logprobs(causal_lm: torch.nn.Module, ids: list[int]) -> list[float]:
    """log p(ids[i] | ids[:i]) for i ≥ 1, temperature 1, fp32 softmax."""
    weight = causal_lm.get_output_embeddings().weight  # type: ignore[operator]
    input_1l = torch.tensor([ids], device=weight.device)
    logits_1lv = causal_lm(input_ids=input_1l, use_cache=False).logits
    logp_lv = torch.log_softmax(logits_1lv[0, :-1].float(), dim=-1)
    values: list[float] = logp_lv.gather(-1, input_1l[0, 1:, None]).squeeze(-1).tolist()
    return values


def check_canary(
    manifest: PolicyVersion, causal_lm: torch.nn.Module, tolerance: float = 0.0, adapter: str = ""
) -> float:
    """The largest difference from the manifest's log-probs; PolicyMismatch above `tolerance` (0: by dtype)."""
    served = canary_logprobs(causal_lm, manifest.canary_ids)
    published = manifest.adapters[adapter].canary_logprobs if adapter else manifest.canary_logprobs
    if len(served) != len(published) or not served:
        raise PolicyMismatch(f"policy v{manifest.version} carries no usable canary", "Publish it again")
    error = max(abs(a - b) for a, b in zip(served, published, strict=True))
    dtype = next(causal_lm.parameters()).dtype
    allowed = tolerance or TOLERANCE.get(dtype, TOLERANCE_DEFAULT)
    if not error <= allowed:
        shown = f" ({adapter})" if adapter else ""
        raise PolicyMismatch(
            f"canary log-probs of policy v{manifest.version}{shown} differ by {error:.3g} (allowed {allowed:g}): "
            "the sampler would serve other weights",
            "Check that sampler and learner use the same base model and dtype",
        )
    return error
