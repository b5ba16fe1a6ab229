"""The decoder of a model by its own modules, over flat rows and with fused kernels between the matrix products.

::

    embedding ─▶ layer(x, position_embeddings, row) … ─▶ norm       layer, q_proj, mlp … are called as modules

For everything that `decoder.FusedDecoder` can't do: weights that are trained, shards (FSDP gathers by hooks of the
layers), several adapters. Norms, SwiGLU, rotation and attention are replaced in the modules' `forward`; weights, names
and hooks stay as they were, and what calls the model without a row (a canary, an export) gets its own attention.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from kbrl_async.learning.fused import elementwise as e
from kbrl_async.learning.fused.attention import attend
from kbrl_async.learning.fused.context import Context
from kbrl_async.learning.fused.families import linear_of
from kbrl_async.learning.fused.flat import FlatBatch


class FlatRow(NamedTuple):
    """What attention has to know of a flat row."""

    lengths: tuple[int, ...]
    context: Context | None


class ModuleDecoder:
    """`decoder(rows)`: hidden states [T, H] behind the last norm, under whatever autocast is on."""

    def __init__(self, causal_lm: torch.nn.Module, context: Context | None = None) -> None:
        self._decoder: Any = causal_lm.get_decoder()  # type: ignore[operator]
        self._context = context
        for layer in self._decoder.layers:
            _replace(layer)
        _replace_norm(self._decoder.norm)

    def __call__(self, rows: FlatBatch, dtype: torch.dtype) -> torch.Tensor:
        """`dtype` of what goes from layer to layer."""
        x_1TH = self._decoder.embed_tokens(rows.input_T).to(dtype)[None]
        turned = self._decoder.rotary_emb(x_1TH, rows.position_T[None])
        row = FlatRow(rows.lengths, self._context)
        for layer in self._decoder.layers:
            out = layer(x_1TH, attention_mask=None, position_embeddings=turned, row=row)
            x_1TH = out[0] if isinstance(out, tuple) else out
        normed_1TH: torch.Tensor = self._decoder.norm(x_1TH)
        return normed_1TH[0]


def _replace(layer: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    attention.forward = functools.partial(_attention, attention, attention.forward)
    mlp.forward = functools.partial(_mlp, mlp)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    for norm in norms:
        _replace_norm(norm)
    for module in linear_of(layer):
        if hasattr(module, "_cast_input_dtype"):
            module._cast_input_dtype = functools.partial(_cast, module._cast_input_dtype)


def _cast(own: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For peft's adapter, which would keep an fp32 copy of each input: autocast needs none, all others do."""
    if torch.is_autocast_enabled(x.device.type):
        return x
    cast: torch.Tensor = own(x, dtype)
    return cast


def _replace_norm(norm: Any) -> None:
    norm.forward = functools.partial(_norm, norm)


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = _RmsNorm.apply(rows, norm.weight, float(norm.variance_epsilon))  # type: ignore[no-untyped-call]
    return out.view(x.shape)


def _mlp(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    product = _SwiGlu.apply(gate.flatten(0, -2), up.flatten(0, -2))  # type: ignore[no-untyped-call]
    out: torch.Tensor = mlp.down_proj(product.view(gate.shape))
    return out


def _attention(attention: Any, own: Any, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    row: FlatRow | None = named.pop("row", None)
    if row is None:
        return own(hidden_states, *arguments, **named)
    cos_1TD, sin_1TD = named["position_embeddings"]
    shape = (hidden_states.shape[1], -1, attention.head_dim)
    q_TND, k_TND, v_TND = (
        project(hidden_states).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q_TND, k_TND = attention.q_norm(q_TND), attention.k_norm(k_TND)
    qkv_TO = torch.cat((q_TND, k_TND, v_TND), 1).flatten(1)
    heads, kv_heads = q_TND.shape[1], k_TND.shape[1]
    q, k, v = _Rotation.apply(qkv_TO, cos_1TD[0], sin_1TD[0], heads, kv_heads)  # type: ignore[no-untyped-call]
    out_TI = attend(q, k, v, row.lengths, context=row.context)
    return attention.o_proj(out_TI[None]), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
        out_TH = torch.empty_like(x_TH)
        inverse_T = e.rms_norm(x_TH, weight_H, epsilon, out_TH)
        ctx.save_for_backward(x_TH, weight_H, inverse_T)
        return out_TH

    @staticmethod
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> Any:
        x_TH, weight_H, inverse_T = ctx.saved_tensors
        gradient_TH = gradient_TH.contiguous()
        dx_TH = e.rms_norm_backward(gradient_TH, x_TH, weight_H, inverse_T) if ctx.needs_input_grad[0] else None
        dw_H = None
        if ctx.needs_input_grad[1]:
            dw_H = e.rms_norm_weight(gradient_TH, x_TH, inverse_T).to(weight_H.dtype)
        return dx_TH, dw_H, None


class _SwiGlu(torch.autograd.Function):
    """Its inputs become their gradients in the backward pass: nobody else keeps what a linear layer gives."""

    @staticmethod
    def forward(ctx: Any, gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        return e.swiglu(gate_TI, up_TI)

    @staticmethod
    def backward(ctx: Any, gradient_TI: torch.Tensor) -> Any:
        gate_TI, up_TI = ctx.saved_tensors
        e.swiglu_backward(gradient_TI.contiguous(), gate_TI, up_TI)
        return gate_TI, up_TI


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TO: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, heads: int, kv_heads: int
    ) -> Any:
        ctx.save_for_backward(cos_TD, sin_TD)
        return e.rotate(qkv_TO, None, cos_TD, sin_TD, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        cos_TD, sin_TD = ctx.saved_tensors
        return e.rotate_backward(dq, dk, dv, cos_TD, sin_TD), None, None, None, None
