"""What stands between a decoder layer's matrix products, each in one pass over memory, with its backward by hand.

One function a job, in plain torch for every device; on a CUDA device with Triton the kernels of `elementwise_triton`
take over. All arithmetic is fp32 inside, results are rounded to the type of the input, as the model's own modules do.

Invariant: nothing here gives a gradient to a bias, and only `rms_norm_weight` gives one to a norm's weight.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes: T tokens, H hidden, I intermediate, V vocabulary
from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch

from kbrl_async.learning.fused.norms import HeadNorms


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
    unit_TH = x_TH.float() * inverse_T[..., None]
    along_T1 = (scaled_TH * unit_TH).mean(-1, keepdim=True)
    out_TH = inverse_T[..., None] * (scaled_TH - unit_TH * along_T1)
    return (out_TH if residual_TH is None else out_TH + residual_TH.float()).to(x_TH.dtype)


def rms_norm_weight(gradient_TH: torch.Tensor, x_TH: torch.Tensor, inverse_T: torch.Tensor) -> torch.Tensor:
    """d loss/d weight [H] in fp32."""
    if kernels := _kernels(x_TH):
        found: torch.Tensor = kernels.rms_norm_weight(gradient_TH, x_TH, inverse_T)
        return found
    return (gradient_TH.float() * x_TH.float() * inverse_T[:, None]).sum(0)


def rotate(
    qkv_TO: torch.Tensor,
    bias_O: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, heads, D], k and v [T, kv_heads, D] of a fused projection: bias added, q and k normed where `norms` are
    given, and rotated by position."""
    if kernels := _kernels(qkv_TO):
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernels.rotate(
            qkv_TO, bias_O, cos_TD, sin_TD, heads, kv_heads, norms
        )
        return made
    if bias_O is not None:
        qkv_TO = qkv_TO + bias_O
    q_TND, k_TND, v_TND = _heads_of(qkv_TO, heads, kv_heads)
    if norms is not None:
        q_TND, k_TND = (_head_normed(x, w, norms.epsilon) for x, w in ((q_TND, norms.q_D), (k_TND, norms.k_D)))
    return _turned(q_TND, cos_TD, sin_TD), _turned(k_TND, cos_TD, sin_TD), v_TND.contiguous()


def _heads_of(qkv_TO: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    all_TND = qkv_TO.view(len(qkv_TO), heads + 2 * kv_heads, -1)
    q_TND, k_TND, v_TND = torch.split(all_TND, [heads, kv_heads, kv_heads], 1)
    return q_TND, k_TND, v_TND


def _head_normed(x_TND: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide_TND = x_TND.float()
    inverse_TN1 = torch.rsqrt(wide_TND.square().mean(-1, keepdim=True) + epsilon)
    return (wide_TND * inverse_TN1).to(x_TND.dtype) * weight_D


def rotate_backward(
    dq_TND: torch.Tensor,
    dk_TND: torch.Tensor,
    dv_TND: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    norms: HeadNorms | None = None,
    qkv_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient [T, O] of the fused projection's output: a rotation is undone by the opposite angle. With `norms`,
    `qkv_TO` is what they were taken of."""
    if kernels := _kernels(dv_TND):
        found: torch.Tensor = kernels.rotate_backward(dq_TND, dk_TND, dv_TND, cos_TD, sin_TD, norms, qkv_TO)
        return found
    dq_TND, dk_TND = _turned(dq_TND, cos_TD, -sin_TD), _turned(dk_TND, cos_TD, -sin_TD)
    if norms is not None and qkv_TO is not None:
        q_TND, k_TND, _ = _heads_of(qkv_TO, dq_TND.shape[1], dk_TND.shape[1])
        dq_TND = _head_norm_backward(dq_TND, q_TND, norms.q_D, norms.epsilon)
        dk_TND = _head_norm_backward(dk_TND, k_TND, norms.k_D, norms.epsilon)
    return torch.cat((dq_TND, dk_TND, dv_TND), 1).flatten(1)


def _head_norm_backward(
    gradient_TND: torch.Tensor, x_TND: torch.Tensor, weight_D: torch.Tensor, epsilon: float
) -> torch.Tensor:
    wide_TND = x_TND.float()
    inverse_TN = torch.rsqrt(wide_TND.square().mean(-1) + epsilon)
    return rms_norm_backward(gradient_TND, x_TND, weight_D, inverse_TN)


def _turned(x_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    one, two = x_TND.float().chunk(2, -1)
    turned_TND = torch.cat((-two, one), -1)
    return (x_TND.float() * cos_TD.float()[:, None] + turned_TND * sin_TD.float()[:, None]).to(x_TND.dtype)


def swiglu(gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up [T, I]; rows of both may lie apart, equally far."""
    if kernels := _kernels(gate_TI):
        found: torch.Tensor = kernels.swiglu(gate_TI, up_TI)
        return found
    return (torch.nn.functional.silu(gate_TI.float()) * up_TI.float()).to(gate_TI.dtype)


def swiglu_backward(gradient_TI: torch.Tensor, gate_TI: torch.Tensor, up_TI: torch.Tensor, again: bool = False) -> None:
    """Overwrites gate and up with their gradients, and `gradient_TI` with silu(gate) · up where `again`."""
    if kernels := _kernels(gate_TI):
        kernels.swiglu_backward(gradient_TI, gate_TI, up_TI, again)
        return
    wide_TI, gate_wide_TI, up_wide_TI = gradient_TI.float(), gate_TI.float(), up_TI.float()
    sigmoid_TI = torch.sigmoid(gate_wide_TI)
    silu_TI = gate_wide_TI * sigmoid_TI
    slope_TI = sigmoid_TI * (1 + gate_wide_TI * (1 - sigmoid_TI))
    # All products before the first is stored: in fp32 the wide ones are the tensors that are overwritten.
    to_gate_TI, to_up_TI, product_TI = wide_TI * up_wide_TI * slope_TI, wide_TI * silu_TI, silu_TI * up_wide_TI
    gate_TI.copy_(to_gate_TI)
    up_TI.copy_(to_up_TI)
    if again:
        gradient_TI.copy_(product_TI)


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
