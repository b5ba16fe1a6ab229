"""The decoder of the fused families with LoRA on every linear layer: forward and backward by hand, for speed.

It computes what the peft model computes, from the peft model's own parameters, and is checked against it::

    x ─norm─▶ [h | hA] ─▶ W|B ─▶ q k v ─rotate─▶ attention ─▶ W over A ─▶ + x = x'        kept: x, q, k, v, out, x'
    x' ─norm─▶ [h | hA] ─▶ W|B ─▶ gate up ─▶ silu·up ─▶ W over A ─▶ + x'                  kept: gate, up; or nothing

Why it is faster than modules with autograd
* The adapter costs no pass over wide activations: its B stands beside the frozen weight (or its A below it) in one
  matrix, so that one product computes both, forward and backward. q, k, v and gate, up are one product each.
* Norms, rotation, SwiGLU and their backward are one pass over memory each (`elementwise`).
* What the backward pass needs is kept once, and only what is dear to compute again; `keep` says whether gate and up,
  two thirds of it, are.

Invariants
* The frozen weights live once, in the joint matrices; the peft modules see them as views. Adapter parameters stay the
  modules' own (fp32): optimizer, checkpoints and publishing know nothing of this module.
* `refresh` copies the adapters into the joint matrices: after every optimiser step, before the next forward pass.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kbrl_async.learning.fused import elementwise as e
from kbrl_async.learning.fused.attention import KeysValues, attend
from kbrl_async.learning.fused.context import Context
from kbrl_async.learning.fused.families import linear_of
from kbrl_async.learning.fused.flat import FlatBatch
from kbrl_async.learning.fused.memory import MemoryPlan
from kbrl_async.learning.fused.norms import head_norms
from kbrl_async.learning.recompute import again, waiting_on_host

Prefix = Sequence[KeysValues]
"""Of a shared prompt, one pair a layer."""


class _Joint:
    """Linear layers with the same input, their adapters included. `beside` puts B beside W, else A lies below W."""

    def __init__(self, modules: Sequence[Any], adapter: str, dtype: torch.dtype, beside: bool) -> None:
        self.modules, self.adapter, self.beside = modules, adapter, beside
        bases = [m.base_layer for m in modules]
        self.scale = float(modules[0].scaling[adapter])
        self.rank = r = int(modules[0].r[adapter])
        self.inputs, self.outputs = bases[0].in_features, sum(b.out_features for b in bases)
        device = bases[0].weight.device
        self.bias = torch.cat([b.bias.detach() for b in bases]).to(dtype) if bases[0].bias is not None else None
        shape = (self.outputs, self.inputs + r * len(bases)) if beside else (self.outputs + r, self.inputs)
        self.weight = torch.zeros(shape, dtype=dtype, device=device)
        self.small = torch.empty(
            (r * len(bases), self.inputs) if beside else (self.outputs, r), dtype=dtype, device=device
        )
        self.spans: list[tuple[int, int]] = []
        row = 0
        for base in bases:
            self.spans.append((row, row + base.out_features))
            view = self.weight[row : row + base.out_features, : self.inputs]
            view.copy_(base.weight.detach())
            base.weight.data = view
            row += base.out_features

    def parameters(self) -> list[torch.nn.Parameter]:
        """A, then B, of every layer."""
        a = [m.lora_A[self.adapter].weight for m in self.modules]
        return a + [m.lora_B[self.adapter].weight for m in self.modules]

    def copies(self) -> list[torch.Tensor]:
        """Where each of `parameters` goes in the working precision."""
        r, n = self.rank, self.inputs
        if not self.beside:
            return [self.weight[self.outputs :], self.small]
        a = list(torch.split(self.small, r))
        return a + [self.weight[lo:hi, n + i * r : n + (i + 1) * r] for i, (lo, hi) in enumerate(self.spans)]

    def wide(self, h_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """y [T, outputs] and hA [T, r·k]; `h_TX` has room for hA behind its inputs."""
        middle_TR = h_TX[:, : self.inputs] @ self.small.t()
        h_TX[:, self.inputs :] = middle_TR
        return h_TX @ self.weight.t(), middle_TR

    def wide_backward(
        self, gradient_TO: torch.Tensor, h_TI: torch.Tensor, middle_TR: torch.Tensor, input_needed: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        r, n = self.rank, self.inputs
        # Products of their own: a few columns more in the wide ones can cost a whole wave of tiles.
        to_middle_TR = gradient_TO @ self.weight[:, n:]
        dh_TI = gradient_TO @ self.weight[:, :n] if input_needed else None
        a = list(torch.split(to_middle_TR.t() @ h_TI, r))
        # One product over all layers' gradients; the blocks off the diagonal are nobody's.
        b_OR = gradient_TO.t() @ middle_TR
        b = [b_OR[lo:hi, i * r : (i + 1) * r] * self.scale for i, (lo, hi) in enumerate(self.spans)]
        if dh_TI is not None:
            dh_TI.addmm_(to_middle_TR, self.small)
        return dh_TI, [g.float() for g in a + b]

    def narrow(self, a_TI: torch.Tensor, residual_TO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + y [T, outputs] and aA [T, r]."""
        middle_TR = a_TI @ self.weight[self.outputs :].t()
        out_TO = (a_TI @ self.weight[: self.outputs].t()).add_(residual_TO)
        if self.bias is not None:
            out_TO += self.bias
        return out_TO.addmm_(middle_TR, self.small.t()), middle_TR

    def narrow_gradient(self, gradient_TO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """d loss/d input [T, inputs] and d loss/d(aA) [T, r]."""
        to_middle_TR = gradient_TO @ self.small
        return torch.cat((gradient_TO, to_middle_TR), 1) @ self.weight, to_middle_TR

    def narrow_weights(
        self, gradient_TO: torch.Tensor, to_middle_TR: torch.Tensor, a_TI: torch.Tensor, middle_TR: torch.Tensor
    ) -> list[torch.Tensor]:
        return [(to_middle_TR.t() @ a_TI).float(), (gradient_TO.t() @ middle_TR).mul_(self.scale).float()]


class _Layer:
    """One decoder layer: its joint matrices, and norm weights as they are."""

    def __init__(self, layer: Any, adapter: str, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
        q, k, v, out, gate, up, down = linear_of(layer)
        self.qkv = _Joint([q, k, v], adapter, dtype, beside=True)
        self.out = _Joint([out], adapter, dtype, beside=False)
        self.gate_up = _Joint([gate, up], adapter, dtype, beside=True)
        self.down = _Joint([down], adapter, dtype, beside=False)
        self.norm_1, self.norm_2 = layer.input_layernorm, layer.post_attention_layernorm
        self.epsilon = float(self.norm_1.variance_epsilon)
        self.head_norms = head_norms(layer.self_attn)
        self.heads, self.kv_heads = heads, kv_heads

    @property
    def joints(self) -> tuple[_Joint, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def normed(self, x_TH: torch.Tensor, norm: Any, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """norm(x) with `room` more columns [T, H + room], and 1/rms [T]."""
        h_TX = x_TH.new_empty(len(x_TH), x_TH.shape[1] + room)
        return h_TX, e.rms_norm(x_TH, norm.weight, self.epsilon, h_TX[:, : x_TH.shape[1]])


class _Projections(torch.autograd.Function):
    """x → q, k, v. Keeps x, and what head norms are taken of; the norm before is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, layer: _Layer, *_: Any
    ) -> Any:
        joint = layer.qkv
        h_TX, inverse_T = layer.normed(x_TH, layer.norm_1, len(joint.small))
        qkv_TO, middle_TR = joint.wide(h_TX)
        bias_O, norms = joint.bias, layer.head_norms
        if norms is not None and bias_O is not None:
            qkv_TO, bias_O = qkv_TO.add_(bias_O), None
        ctx.layer = layer
        kept = (qkv_TO,) if norms is not None else ()
        ctx.save_for_backward(x_TH, inverse_T, middle_TR, cos_TD, sin_TD, *kept)
        return e.rotate(qkv_TO, bias_O, cos_TD, sin_TD, layer.heads, layer.kv_heads, norms)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        layer: _Layer = ctx.layer
        x_TH, inverse_T, middle_TR, cos_TD, sin_TD, *kept = ctx.saved_tensors
        gradient_TO = e.rotate_backward(dq, dk, dv, cos_TD, sin_TD, layer.head_norms, *kept)
        h_TH, _ = layer.normed(x_TH, layer.norm_1, 0)
        needed = ctx.needs_input_grad[0]
        dh_TH, weights = layer.qkv.wide_backward(gradient_TO, h_TH, middle_TR, needed)
        dx_TH = e.rms_norm_backward(dh_TH, x_TH, layer.norm_1.weight, inverse_T) if dh_TH is not None else None
        return dx_TH, None, None, None, *weights


class _Output(torch.autograd.Function):
    """attention's output, x → x'."""

    @staticmethod
    def forward(ctx: Any, a_TI: torch.Tensor, x_TH: torch.Tensor, layer: _Layer, *_: Any) -> torch.Tensor:
        out_TH, middle_TR = layer.out.narrow(a_TI, x_TH)
        ctx.layer = layer
        ctx.save_for_backward(a_TI, middle_TR)
        return out_TH

    @staticmethod
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> Any:
        a_TI, middle_TR = ctx.saved_tensors
        da_TI, to_middle_TR = ctx.layer.out.narrow_gradient(gradient_TH)
        weights = ctx.layer.out.narrow_weights(gradient_TH, to_middle_TR, a_TI, middle_TR)
        return da_TI, gradient_TH, None, *weights


class _Mlp(torch.autograd.Function):
    """x' → x' + mlp(norm(x')). Keeps gate and up, or computes them again."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, layer: _Layer, keep: bool, *_: Any) -> torch.Tensor:
        h_TX, inverse_T = layer.normed(x_TH, layer.norm_2, len(layer.gate_up.small))
        both_T2I, middle_TR = layer.gate_up.wide(h_TX)
        out_TH, last_TR = layer.down.narrow(e.swiglu(*both_T2I.chunk(2, -1)), x_TH)
        ctx.layer, ctx.both, ctx.is_spent = layer, both_T2I if keep else None, False
        ctx.save_for_backward(x_TH, inverse_T, middle_TR, last_TR)
        return out_TH

    @staticmethod
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> Any:
        assert not ctx.is_spent, "gate and up were overwritten by their gradient: one backward pass only"
        layer: _Layer = ctx.layer
        x_TH, inverse_T, middle_TR, last_TR = ctx.saved_tensors
        h_TX, _ = layer.normed(x_TH, layer.norm_2, len(layer.gate_up.small))
        both_T2I = layer.gate_up.wide(h_TX)[0] if ctx.both is None else ctx.both
        ctx.both, ctx.is_spent = None, True
        a_TI, to_last_TR = layer.down.narrow_gradient(gradient_TH)  # the gradient there, until it is overwritten
        gate_TI, up_TI = both_T2I.chunk(2, -1)
        e.swiglu_backward(a_TI, gate_TI, up_TI, again=True)
        down = layer.down.narrow_weights(gradient_TH, to_last_TR, a_TI, last_TR)
        del a_TI
        h_TH = h_TX[:, : x_TH.shape[1]]
        dh_TH, gate_up = layer.gate_up.wide_backward(both_T2I, h_TH, middle_TR, input_needed=True)
        assert dh_TH is not None
        dx_TH = e.rms_norm_backward(dh_TH, x_TH, layer.norm_2.weight, inverse_T, gradient_TH)
        return dx_TH, None, None, *gate_up, *down


class FusedDecoder:
    """The decoder stack of a peft-wrapped causal LM; takes its frozen weights over (see the module's invariants)."""

    def __init__(self, causal_lm: torch.nn.Module, adapter: str, context: Context | None, offload: bool) -> None:
        """`offload`: the inputs of layers that are computed again wait on the host."""
        config: Any = causal_lm.config
        self._context, self._offload = context, offload
        self._decoder: Any = causal_lm.get_decoder()  # type: ignore[operator]
        self.dtype = self._decoder.embed_tokens.weight.dtype
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [_Layer(layer, adapter, self.dtype, heads, kv_heads) for layer in self._decoder.layers]
        joints = [joint for layer in self._layers for joint in layer.joints]
        self._sources = [p for joint in joints for p in joint.parameters()]
        self._targets = [c for joint in joints for c in joint.copies()]
        self._scaled = [c for joint in joints for c in joint.copies()[len(joint.modules) :]]
        self._scales = [joint.scale for joint in joints for _ in joint.modules]

    def __len__(self) -> int:
        return len(self._layers)

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the adapters as they are now."""
        torch._foreach_copy_(self._targets, [p.detach() for p in self._sources])
        for scale in set(self._scales):
            chosen = [t for t, s in zip(self._scaled, self._scales, strict=True) if s == scale]
            torch._foreach_mul_(chosen, scale)

    def __call__(
        self,
        rows: FlatBatch,
        prefix: Prefix | None = None,
        plan: MemoryPlan | None = None,
        collect: list[KeysValues] | None = None,
        wanted_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, H] before the last norm; [N, H] of the rows `wanted_N`, where given: the last layer
        computes no others.

        The layers of `plan` that keep more are the last ones: what those hold is free again when the first ones compute
        theirs anew. `collect` receives each layer's k and v.
        """
        kept, whole = plan or (len(self), len(self))
        x_TH = torch.nn.functional.embedding(rows.input_T, self._decoder.embed_tokens.weight)
        cos_1TD, sin_1TD = self._decoder.rotary_emb(x_TH[None], rows.position_T[None])
        with torch.autocast(x_TH.device.type, enabled=False):
            for number, layer in enumerate(self._layers):
                before, behind = None if prefix is None else prefix[number], len(self) - number
                wanted = wanted_N if behind == 1 else None
                turned = (cos_1TD[0], sin_1TD[0])
                arguments = (layer, x_TH, *turned, rows.lengths, before, behind <= kept, wanted, self._context)
                if behind <= whole or not torch.is_grad_enabled():
                    x_TH, k_TND, v_TND = _run(*arguments)
                else:
                    with waiting_on_host(self._offload):
                        x_TH, k_TND, v_TND = again(_run, *arguments)
                if collect is not None:
                    collect.append((k_TND, v_TND))
        return x_TH

    def normed(self, x_NH: torch.Tensor) -> torch.Tensor:
        """The decoder's last norm."""
        out: torch.Tensor = self._decoder.norm(x_NH)
        return out


def _run(
    layer: _Layer,
    x_TH: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    lengths: tuple[int, ...],
    prefix: KeysValues | None,
    keep: bool,
    wanted_N: torch.Tensor | None,
    context: Context | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = _Projections.apply(x_TH, cos_TD, sin_TD, layer, *layer.qkv.parameters())  # type: ignore[no-untyped-call]
    out_TI = attend(q, k, v, lengths, prefix, context)
    if wanted_N is not None:
        out_TI, x_TH = out_TI.index_select(0, wanted_N), x_TH.index_select(0, wanted_N)
    x_TH = _Output.apply(out_TI, x_TH, layer, *layer.out.parameters())  # type: ignore[no-untyped-call]
    adapters = (*layer.gate_up.parameters(), *layer.down.parameters())
    return _Mlp.apply(x_TH, layer, keep, *adapters), k, v  # type: ignore[no-untyped-call]
