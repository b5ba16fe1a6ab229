"""Two ways to compute a policy's log-probs and their gradients: through the model's own modules, or fused for speed.

::

    samples ─ pack ─▶ microbatches ─ forward ─▶ visit(scored) ─ loss, or None ─▶ backward ─▶ tick

Invariants
* `visit` sees every response token exactly once, and the gradients that are left add up to those of its losses.
* Between the first forward and the last backward pass the host never waits for the device.
"""

# ruff: noqa: N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.fused import memory
from kbrl_async.learning.fused.decoder import FusedDecoder, why_not
from kbrl_async.learning.fused.flat import Bundle, FlatBatch, bundle
from kbrl_async.learning.logprobs import batch_logprobs, token_logprobs
from kbrl_async.learning.packing import Microbatch, pack
from kbrl_async.learning.policies.models import active, adapter_names, adapter_of, causal_lm
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.sharded import ShardedModel
from protocols.records import TrainSample


class Scored(NamedTuple):
    """The response tokens of one microbatch, on the device; all [T]."""

    log_pi_T: torch.Tensor
    entropy_T: torch.Tensor
    sample_T: torch.Tensor
    """Index in the list of samples that was given."""
    offset_T: torch.Tensor
    inputs: int
    """Tokens that were computed, prompts and padding included."""


BLANK = TrainSample("idle", [0], [0], [0.0], 0.0, 0.0, 0)
Visit = Callable[[Scored], torch.Tensor | None]
Tick = Callable[[], None]


def computes_bf16(learner: Learner, device: torch.device) -> bool:
    """`learner.dtype` with `auto` resolved: fp32 on a CPU, where sampler and learner then agree to 1e-3 a ratio."""
    return learner.dtype == "bfloat16" or (learner.dtype == "auto" and device.type != "cpu")


def _chunk_elements(device: torch.device) -> int:
    """Most logits that exist at once: a GPU's matrix products want long chunks."""
    return 1 << (27 if device.type == "cuda" else 24)


class ForwardBackward(Protocol):
    """`run` computes all of `samples`; gradients are added to the parameters' where they are enabled."""

    name: str

    def run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None: ...


class Plain:
    """The model's own forward pass under autograd, with its prompts shared in small trees (`packing`)."""

    name = "plain"

    def __init__(
        self, model: torch.nn.Module, learner: Learner, device: torch.device, sharded: ShardedModel | None = None
    ) -> None:
        self._model, self._learner, self._device, self._sharded = model, learner, device, sharded
        self._adapters = adapter_names(model)

    def run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None:
        packed = [(adapter, batch.to(self._device)) for adapter, batch in self._pack(samples)]
        # Asked before the first pass: every collective comes at the same place on all ranks.
        passes = len(packed) if self._sharded is None else self._sharded.passes(len(packed))
        for adapter, batch in packed:
            # Held through the backward pass: gradient checkpointing runs the forward pass again there.
            with active(self._model, adapter):
                logp_T, entropy_T = self._scores(batch, temperature)
                scored = Scored(logp_T, entropy_T, batch.sample_T, batch.offset_T, batch.input_BL.numel())
                _backward(visit(scored))
            tick()
        for _ in range(len(packed), passes):
            self._idle()
            tick()

    def _scores(self, batch: Microbatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        def compute(lm: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
            logp_T, entropy_T = batch_logprobs(lm, batch, temperature, _chunk_elements(self._device))
            return logp_T.clone(), entropy_T  # no view: FSDP can't follow one

        with torch.autocast(self._device.type, torch.bfloat16, enabled=computes_bf16(self._learner, self._device)):
            return compute(causal_lm(self._model)) if self._sharded is None else self._sharded(compute)

    def _idle(self) -> None:
        """A pass without effect, while another rank makes one of its own."""
        (batch,) = pack([BLANK], self._learner.microbatch_tokens)
        logp_T, _ = self._scores(batch.to(self._device), 1.0)
        if logp_T.requires_grad:
            _backward((logp_T * 0.0).sum())

    def _pack(self, samples: Sequence[TrainSample]) -> list[tuple[str, Microbatch]]:
        """Microbatches, each with the adapter that all its samples belong to."""
        members: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            members.setdefault(adapter_of(sample.role, self._adapters), []).append(index)
        packed = []
        for adapter, indices in members.items():
            where = torch.tensor(indices)
            batches = pack([samples[i] for i in indices], self._learner.microbatch_tokens)
            packed += [(adapter, dataclasses.replace(b, sample_T=where[b.sample_T])) for b in batches]
        return packed


class Fused:
    """`fused.FusedDecoder` over flat rows, each group's prompt computed once."""

    name = "fused"

    def __init__(self, model: torch.nn.Module, learner: Learner, device: torch.device) -> None:
        self._learner, self._device = learner, device
        self._model = model
        self._causal_lm = causal_lm(model)
        self._decoder = FusedDecoder(self._causal_lm, adapter_names(model)[0])
        self._shape = _shape(self._causal_lm)
        self._room = _room(model, learner, device)
        self._plain = Plain(model, learner, device)

    def plan(self, tokens: int) -> memory.Plan:
        """What a microbatch of so many tokens keeps for its backward pass."""
        return memory.plan(self._shape, tokens, self._room)

    def run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None:
        if not _is_adapted(self._model):
            self._plain.run(samples, temperature, visit, tick)
            return
        self._decoder.refresh()
        # Packed and sent one by one: the host prepares a bundle while the device computes those before it.
        for cpu in bundle(samples, self._learner.microbatch_tokens, self._learner.share_prompts):
            made = cpu.to(self._device)
            if made.prompt is None:
                self._batches(made, [], None, temperature, visit, tick)
            else:
                self._continued(made, made.prompt, temperature, visit, tick)

    def _continued(self, made: Bundle, prompt: FlatBatch, temperature: float, visit: Visit, tick: Tick) -> None:
        """A prompt, everything that continues it, then the prompt's backward pass."""
        prompt_plan = self.plan(len(prompt.input_T) + max(len(batch.input_T) for batch in made.batches))
        collected: list[tuple[torch.Tensor, torch.Tensor]] = []
        kept, whole = prompt_plan
        last_1H = self._decoder(prompt, None, kept, whole, collected, prompt.predict_N)
        roots = [*(x for pair in collected for x in pair), last_1H]
        # fp32, so that the gradients of many responses add up without loss.
        leaves = [root.detach().float().requires_grad_(root.requires_grad) for root in roots]
        self._batches(made, leaves, prompt, temperature, visit, tick)
        if torch.is_grad_enabled():
            pairs = [(r, leaf.grad.to(r.dtype)) for r, leaf in zip(roots, leaves, strict=True) if leaf.grad is not None]
            torch.autograd.backward([r for r, _ in pairs], [gradient for _, gradient in pairs])

    def _batches(
        self,
        made: Bundle,
        leaves: list[torch.Tensor],
        prompt: FlatBatch | None,
        temperature: float,
        visit: Visit,
        tick: Tick,
    ) -> None:
        head = self._causal_lm.get_output_embeddings()  # type: ignore[operator]
        shared = 0 if prompt is None else len(prompt.input_T)
        for number, batch in enumerate(made.batches):
            plan = self.plan(shared + len(batch.input_T))
            near = [leaf.to(head.weight.dtype) for leaf in leaves]
            prefix = list(zip(near[:-1:2], near[1:-1:2], strict=True)) or None
            is_first_N = batch.predict_N == len(batch.input_T)  # predicted by the shared prompt's last token
            rows_N = batch.predict_N.masked_fill(is_first_N, 0)
            hidden_NH = self._decoder(batch, prefix, plan.kept, plan.whole, wanted_N=rows_N)
            if near:
                hidden_NH = torch.where(is_first_N[:, None], near[-1], hidden_NH)
            hidden_NH = self._decoder.normed(hidden_NH)
            vocabulary, chunk = head.weight.shape[0], _chunk_elements(self._device)
            scores = token_logprobs(hidden_NH, head, batch.target_N, temperature, vocabulary, chunk)
            inputs = len(batch.input_T) + (shared if number == 0 else 0)
            _backward(visit(Scored(*scores, batch.sample_T, batch.offset_T, inputs)))
            tick()


def _backward(loss: torch.Tensor | None) -> None:
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]


def _is_adapted(model: torch.nn.Module) -> bool:
    """The adapter is switched on; peft's `disable_adapter` switches it off for a reference."""
    layers = (m for m in model.modules() if hasattr(m, "lora_A"))
    return not any(getattr(layer, "disable_adapters", False) for layer in layers)


def _shape(lm: torch.nn.Module) -> memory.Shape:
    config: Any = lm.config
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return memory.Shape(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * depth,
        2 * config.num_key_value_heads * depth,
        next(lm.parameters()).element_size(),
    )


def _room(model: torch.nn.Module, learner: Learner, device: torch.device) -> float:
    """Bytes for activations: what may be held, less what is held already, gradients and Adam's moments."""
    if device.type != "cuda":
        return learner.memory_gb * 1e9 or float("inf")
    limit = learner.memory_gb * 1e9 or 0.9 * torch.cuda.get_device_properties(device).total_memory
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return limit - torch.cuda.memory_allocated(device) - 12 * trained


def forward_backward(
    model: torch.nn.Module, learner: Learner, device: torch.device, sharded: ShardedModel | None = None
) -> ForwardBackward:
    """What `learner.kernels` names; `auto` is fused on a GPU where the model allows it, else plain.

    :raises ConfigError: `fused` can't be had.
    """
    if learner.kernels == "plain" or (learner.kernels == "auto" and device.type != "cuda"):
        return Plain(model, learner, device, sharded)
    by_ranks = "" if sharded is None else "its weights are sharded over the ranks (learner.shard)"
    refusal = by_ranks or why_not(model) or _wrong_precision(model, learner, device)
    if not refusal:
        return Fused(model, learner, device)
    if learner.kernels == "auto":
        return Plain(model, learner, device, sharded)
    raise ConfigError(f"learner.kernels=fused can't be had for this model: {refusal}", "Use auto or plain")


def _wrong_precision(model: torch.nn.Module, learner: Learner, device: torch.device) -> str:
    held = causal_lm(model).get_decoder().embed_tokens.weight.dtype  # type: ignore[operator]
    bf16 = computes_bf16(learner, device)
    if bf16 != (held == torch.bfloat16):
        return f"its weights are {held} and the arithmetic is {'bf16' if bf16 else 'fp32'}"
    return ""
