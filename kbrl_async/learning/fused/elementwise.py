"""What stands between a decoder layer's matrix products, each in one pass over memory, with its backward by hand.

One function a job, in plain torch for every device; on a CUDA device with Triton the kernels of `elementwise_triton`
take over. All arithmetic is fp32 inside, results are rounded to the type of the input, as the model's own modules do.

Invariant: only activations get gradients here; norm weights and biases are frozen (LoRA).
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes: T tokens, H hidden, I intermediate, V vocabulary
from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch


@functools.cache
def _triton() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from kbrl_async.learning.fused import elementwise_triton

    return elementwise_triton


def _kernels(tensor: torch.Tensor) -> ModuleType | None:
    return _triton() if tensor.is_cuda else None


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float, out_TH: torch.Tensor) -> torch.Tensor:
    """Writes the norm of `x_TH` into `out_TH` (rows may lie apart) and returns 1/rms [T] in fp32."""
    if kernels := _kernels(x_TH):
        found: torch.Tensor = kernels.rms_norm(x_TH, weight_H, epsilon, out_TH)
        return found
    wide_TH = x_TH.float()
    inverse_T = torch.rsqrt(wide_TH.square().mean(-1) + epsilon)
    out_TH.copy_((wide_TH * inverse_T[:, None]).to(x_TH.dtype) * weight_H)
    return inverse_T


def rms_norm_backward(
    gradient_TH: torch.Tensor,
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    inverse_T: torch.Tensor,
    residual_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """d loss/d x, plus `residual_TH`: the gradient that goes round the norm."""
    if kernels := _kernels(x_TH):
        found: torch.Tensor = kernels.rms_norm_backward(gradient_TH, x_TH, weight_H, inverse_T, residual_TH)
        return found
    scaled_TH = gradient_TH.float() * weight_H.float()
    unit_TH = x_TH.float() * inverse_T[:, None]
    along_T1 = (scaled_TH * unit_TH).mean(-1, keepdim=True)
    out_TH = inverse_T[:, None] * (scaled_TH - unit_TH * along_T1)
    return (out_TH if residual_TH is None else out_TH + residual_TH.float()).to(x_TH.dtype)


def rotate(
    qkv_TO: torch.Tensor,
    bias_O: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, heads, D], k and v [T, kv_heads, D] of a fused projection: bias added, q and k rotated by position."""
    if kernels := _kernels(qkv_TO):
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernels.rotate(
            qkv_TO, bias_O, cos_TD, sin_TD, heads, kv_heads
        )
        return made
    if bias_O is not None:
        qkv_TO = qkv_TO + bias_O
    all_TND = qkv_TO.view(len(qkv_TO), heads + 2 * kv_heads, -1)
    q_TND, k_TND, v_TND = torch.split(all_TND, [heads, kv_heads, kv_heads], 1)
    return _turned(q_TND, cos_TD, sin_TD), _turned(k_TND, cos_TD, sin_TD), v_TND.contiguous()


def rotate_backward(
    dq_TND: torch.Tensor, dk_TND: torch.Tensor, dv_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> torch.Tensor:
    """Gradient [T, O] of the fused projection's output: a rotation is undone by the opposite angle."""
    if kernels := _kernels(dv_TND):
        found: torch.Tensor = kernels.rotate_backward(dq_TND, dk_TND, dv_TND, cos_TD, sin_TD)
        return found
    parts = (_turned(dq_TND, cos_TD, -sin_TD), _turned(dk_TND, cos_TD, -sin_TD), dv_TND)
    return torch.cat(parts, 1).flatten(1)


def _turned(x_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    one, two = x_TND.float().chunk(2, -1)
    turned_TND = torch.cat((-two, one), -1)
    return (x_TND.float() * cos_TD.float()[:, None] + turned_TND * sin_TD.float()[:, None]).to(x_TND.dtype)


def swiglu(both_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up [T, I] of the fused projection [gate | up]."""
    if kernels := _kernels(both_T2I):
        found: torch.Tensor = kernels.swiglu(both_T2I)
        return found
    gate_TI, up_TI = both_T2I.chunk(2, -1)
    return (torch.nn.functional.silu(gate_TI.float()) * up_TI.float()).to(both_T2I.dtype)


def swiglu_backward(gradient_TI: torch.Tensor, both_T2I: torch.Tensor) -> torch.Tensor:
    """Overwrites `both_T2I` with its gradient, and `gradient_TI` with silu(gate) · up, not kept before; returns it."""
    if kernels := _kernels(both_T2I):
        found: torch.Tensor = kernels.swiglu_backward(gradient_TI, both_T2I)
        return found
    gate_TI, up_TI = both_T2I.float().chunk(2, -1)
    sigmoid_TI = torch.sigmoid(gate_TI)
    silu_TI = gate_TI * sigmoid_TI
    slope_TI = sigmoid_TI * (1 + gate_TI * (1 - sigmoid_TI))
    wide_TI = gradient_TI.float()
    product_TI = (silu_TI * up_TI).to(gradient_TI.dtype)  # first: `up_TI` may be a view of what is overwritten
    both_T2I.copy_(torch.cat((wide_TI * up_TI * slope_TI, wide_TI * silu_TI), -1))
    return gradient_TI.copy_(product_TI)


def softmax_scores(
    logits_TV: torch.Tensor, target_T: torch.Tensor, temperature: float, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy [T] in fp32 of softmax(logits / temperature).

    With `with_gradient`, overwrites `logits_TV` with d log p(target) / d logits.
    """
    if kernels := _kernels(logits_TV):
        found: tuple[torch.Tensor, torch.Tensor] = kernels.softmax_scores(
            logits_TV, target_T, temperature, with_gradient
        )
        return found
    log_TV = torch.log_softmax(logits_TV.float() / temperature, -1)
    share_TV = log_TV.exp()
    chosen_T = log_TV.gather(-1, target_T[:, None]).squeeze(-1)
    entropy_T = -(share_TV * log_TV).sum(-1)
    if with_gradient:
        slope_TV = share_TV.neg_().scatter_add_(-1, target_T[:, None], torch.ones_like(chosen_T)[:, None])
        logits_TV.copy_(slope_TV / temperature)
    return chosen_T, entropy_T
