"""The canary: proof that what is served is what the learner published (I8).

::

    manifest: text, ids, log-probs ─▶ tokenizer: the same ids?  ─▶ engine: the same log-probs?  ─▶ served
                                       weights of another version, or the base's? ─┘   tokens drawn at the temperature?

Invariants
* Each of these has a check of its own that names it: the base model, a stale version, another tokenizer, another
  temperature.
* A version whose proof fails is never served; what proves it goes the way that rollouts go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from kbrl_async.errors import PolicyMismatch
from protocols.records import CanaryPrompt, PolicyVersion

TOLERANCE = {torch.float32: 1e-3}
"""Largest allowed |difference| of one log-prob by dtype; same arithmetic agrees to 1e-5 in fp32."""
TOLERANCE_DEFAULT = 2e-2
ENGINE_TOLERANCE = {"float32": 1e-3, "bfloat16": 8e-2, "float16": 3e-2}
"""Largest allowed root mean square where engine and learner differ in kernels, and in number format."""
LAYERS = 36
"""What rounding does adds up over layers: a random model's log-probs in bf16 are off by .042 with 36, .118 with 64; two
engines with 36 layers differed by .031. `ENGINE_TOLERANCE` is for so many."""
TEMPERATURE_TOLERANCE = 0.05
"""Largest allowed relative error of the measured temperature."""
NOISE = max(ENGINE_TOLERANCE.values())
"""Standard deviation of log-probs, above which noise excuses no temperature, with up to `LAYERS` layers."""
CURE = "Check that sampler and learner use the same base model, folder of policies and dtype"


def engine_tolerance(dtype: str, depth: int = 0) -> float:
    """Largest allowed root mean square between engine and learner, for a model of `depth` layers.

    >>> engine_tolerance("bfloat16"), round(engine_tolerance("bfloat16", depth=64), 3)
    (0.08, 0.142)
    """
    return ENGINE_TOLERANCE.get(dtype, TOLERANCE_DEFAULT) * max(1.0, depth / LAYERS)


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
    dtype = next(causal_lm.parameters()).dtype
    rounded = manifest.dtype != "fp32"  # the log-probs may come from ranks that computed in that format, too
    layers = getattr(causal_lm.config, "num_hidden_layers", 0)
    as_rounded = engine_tolerance("bfloat16", layers)
    allowed = tolerance or (as_rounded if rounded else TOLERANCE.get(dtype, TOLERANCE_DEFAULT))
    errors = []
    for canary in canaries_of(manifest, adapter):
        served = canary_logprobs(causal_lm, canary.ids)
        if len(served) != len(canary.logprobs) or not served:
            raise _unusable(manifest)
        largest = max(abs(a - b) for a, b in zip(served, canary.logprobs, strict=True))
        errors.append(rms(served, canary.logprobs) if rounded else largest)
    error = max(errors)
    if not error <= allowed:
        raise PolicyMismatch(
            f"canary log-probs of {_format_version(manifest, adapter)} differ by {error:.3g} (allowed {allowed:g}): "
            "the sampler would serve other weights",
            "Check that sampler and learner use the same base model and dtype",
        )
    return error


def canaries_of(manifest: PolicyVersion, adapter: str = "") -> list[CanaryPrompt]:
    """All canaries of one adapter, the one that every manifest has first; PolicyMismatch where that is unusable."""
    logprobs = manifest.adapters[adapter].canary_logprobs if adapter else manifest.canary_logprobs
    if not logprobs or len(logprobs) != len(manifest.canary_ids) - 1:
        raise _unusable(manifest)
    first = CanaryPrompt("", manifest.canary_ids, logprobs)
    return [first] if adapter else [first, *manifest.canaries]


def check_tokenizer(manifest: PolicyVersion, encode: Callable[[str], list[int]]) -> None:
    """PolicyMismatch unless `encode` makes the ids of the canaries' texts."""
    for canary in manifest.canaries:
        ids = encode(canary.text)[: len(canary.ids)]
        if ids != canary.ids:
            at = next((i for i, (a, b) in enumerate(zip(ids, canary.ids, strict=False)) if a != b), len(ids))
            raise PolicyMismatch(
                f"the sampler's tokenizer is not that of policy v{manifest.version}: "
                f"they differ at token {at} of canary {canary.text[:40]!r}",
                "Put the learner's tokenizer beside the sampler's model",
            )


def judge(
    claim: str,
    served: Sequence[float],
    published: Sequence[float],
    others: Mapping[str, Sequence[float]],
    allowed: float,
) -> float:
    """Root mean square of `served` − `published` (log-probs of the same tokens). PolicyMismatch where it is above
    `allowed`, or where `served` is rather what one of `others` (by name) would give, however small the difference is.
    """
    if len(served) != len(published) or not all(map(math.isfinite, served)):
        raise PolicyMismatch(f"{claim}: the engine gives no usable log-probs of the canary", CURE)
    rather = {
        name: rms(served, logprobs) for name, logprobs in others.items() if _is_rather(served, published, logprobs)
    }
    error = rms(served, published)
    if rather:
        nearest = min(rather, key=lambda name: rather[name])
        how = f"off by {rather[nearest]:.3g}, and from its own by {error:.3g}"
        raise PolicyMismatch(f"what is served as {claim} has the canary log-probs of {nearest} ({how})", CURE)
    if not error <= allowed:
        cause = f"canary log-probs of {claim} differ by {error:.3g} (allowed {allowed:g}): other weights are served"
        raise PolicyMismatch(cause, CURE)
    return error


def rms(one: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square of their differences."""
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(other))


DISTINCT = 2e-5
"""Root mean square between two versions' log-probs below which nobody can tell them apart."""
SIGMAS = 6.0


def _is_rather(served: Sequence[float], published: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `served` lies past the middle from `published` to `other`, and noise alone can't have put it there.

    Each of the three has noise of its own: bf16 kernels are off by more than an update moves the policy. That of
    `published` is in both differences, so with equal versions `served` comes to lie about at the middle, not at
    `published`; how far it is past the middle is what counts. The noise of that is what remains of served − published
    across the line. So bf16 raises no false alarm, and fp32 finds a version that is stale by one small step.
    """
    n = len(published)
    line = [o - p for o, p in zip(other, published, strict=True)]
    off = [s - p for s, p in zip(served, published, strict=True)]
    length2 = math.fsum(x * x for x in line)
    if length2 <= n * DISTINCT**2:
        return False
    share = math.fsum(a * b for a, b in zip(line, off, strict=True)) / length2
    across = math.fsum((b - share * a) ** 2 for a, b in zip(line, off, strict=True))
    sigma = math.sqrt(across / max(1, n - 1))
    return (share - 0.5) * math.sqrt(length2) > SIGMAS * sigma


def check_temperature(
    rows: Sequence[Sequence[tuple[float, float]]], expected: float, most_noise: float = NOISE
) -> float:
    """The temperature that tokens are drawn at; PolicyMismatch unless it is `expected`.

    `rows` holds, for a few positions, (log-prob at temperature 1, recorded log-prob) of several tokens. Recorded are
    z/T − log Σ exp(z/T): differences within a position are those at temperature 1, divided by T.
    """
    raw2 = both = recorded2 = 0.0
    for row in rows:
        raw_mean = math.fsum(raw for raw, _ in row) / len(row)
        recorded_mean = math.fsum(recorded for _, recorded in row) / len(row)
        raw2 += math.fsum((raw - raw_mean) ** 2 for raw, _ in row)
        recorded2 += math.fsum((recorded - recorded_mean) ** 2 for _, recorded in row)
        both += math.fsum((raw - raw_mean) * (recorded - recorded_mean) for raw, recorded in row)
    measured = raw2 / both if both > 0 else math.inf
    # What does not follow the line is noise; where tokens are nearly alike, as of random weights, bf16 alone bends it.
    free = sum(map(len, rows)) - len(rows) - 1
    noise = math.sqrt(max(0.0, recorded2 - both / measured) / max(1, free)) if both > 0 else math.inf
    is_noise = noise <= most_noise and abs(1 / measured - 1 / expected) * math.sqrt(raw2) <= SIGMAS * noise
    if not abs(measured / expected - 1.0) <= TEMPERATURE_TOLERANCE and not is_noise:
        raise PolicyMismatch(
            f"the engine draws or scores tokens at temperature {measured:.3g} where {expected:g} was asked for",
            "Recorded log-probs must be those of the sampling distribution: look at the engine's own sampling settings",
        )
    return measured


def _format_version(manifest: PolicyVersion, adapter: str) -> str:
    return f"policy v{manifest.version}" + (f" ({adapter})" if adapter else "")


def _unusable(manifest: PolicyVersion) -> PolicyMismatch:
    return PolicyMismatch(f"policy v{manifest.version} carries no usable canary", "Publish it again")
