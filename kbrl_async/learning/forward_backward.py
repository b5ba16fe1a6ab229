"""Three ways to compute a policy's log-probs and their gradients.

::

    samples ─ pack ─▶ microbatches ─ forward ─▶ visit(scored) ─ loss, or None ─▶ backward ─▶ tick

    Plain      any causal LM of transformers, as it is
    Modules    families of `fused.families`: flat rows and fused kernels in its own modules; shards, trained weights
    Fused      LoRA on them, its backward pass by hand: prompts shared, and the fastest

Invariants
* `visit` sees every response token exactly once, and the gradients that are left add up to those of its losses.
* Between the first forward and the last backward pass the host never waits for the device.
"""

# ruff: noqa: N803, N806, N815 - capital suffixes of names give tensor shapes
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import structlog
import torch
from torch.distributed.tensor import DTensor

from kbrl_async.errors import ConfigError
from kbrl_async.learning.fused import context, families, memory
from kbrl_async.learning.fused.decoder import FusedDecoder
from kbrl_async.learning.fused.flat import LEAST_SHARED, Bundle, FlatBatch, bundle, by_prompt
from kbrl_async.learning.fused.modules import ModuleDecoder
from kbrl_async.learning.logprobs import batch_logprobs, token_logprobs
from kbrl_async.learning.packing import Microbatch, pack
from kbrl_async.learning.policies.models import active, adapter_names, adapter_of, causal_lm
from kbrl_async.learning.recompute import Recompute, decoder_layers
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


SHARED_MAY_DIFFER = 0.15
"""Of a gradient's norm, by what is computed in another order in bf16: .01 where it is right, .7 where it was not."""
BLANK = TrainSample("idle", [0], [0], [0.0], 0.0, 0.0, 0)
Visit = Callable[[Scored], torch.Tensor | None]
Tick = Callable[[], None]
Batch = TypeVar("Batch", Microbatch, FlatBatch)
log = structlog.get_logger()


def computes_bf16(learner: Learner, device: torch.device) -> bool:
    """`learner.dtype` with `auto` resolved: fp32 on a CPU, where sampler and learner then agree to 1e-3 a ratio."""
    return learner.dtype == "bfloat16" or (learner.dtype == "auto" and device.type != "cpu")


def _computed_in(learner: Learner, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if computes_bf16(learner, device) else torch.float32


class ForwardBackward(Protocol):
    """`run` computes all of `samples`; gradients are added to the parameters' where they are enabled."""

    name: str

    def run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None: ...


class OfModules(Generic[Batch]):
    """The model's own modules under autograd and autocast, sharded or not; subclasses say how samples are packed."""

    name: str
    path: memory.Path

    def __init__(
        self, model: torch.nn.Module, learner: Learner, device: torch.device, sharded: ShardedModel | None = None
    ) -> None:
        self._model, self._learner, self._device, self._sharded = model, learner, device, sharded
        self._adapters = adapter_names(model)
        self._recompute: Recompute | None = None
        self._room: memory.ActivationRoom | None = None

    def recomputing(self) -> Self:
        """Chooses what is computed again, from now on: the model's layers are wrapped, once."""
        inner, learner = causal_lm(self._model), self._learner
        itemsize = _computed_in(learner, self._device).itemsize
        self.shape = memory.shape_of(inner.config, itemsize, self.path, learner.offload_activations)
        self._room = _room(self._model, learner, self._device)
        self._recompute = Recompute(inner, learner.offload_activations)
        return self

    def plan(self, tokens: int) -> memory.MemoryPlan:
        """What a microbatch of so many tokens keeps for its backward pass."""
        assert self._room is not None, "asked of who computes again"
        return memory.planned(self._learner.activation_checkpointing, self.shape, tokens, self._room.bytes)

    def run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None:
        with contextlib.nullcontext() if self._room is None else self._room.watched():
            self._run(samples, temperature, visit, tick)

    def _run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None:
        packed = [(adapter, batch.to(self._device)) for adapter, batch in self._grouped(samples)]
        # Asked before the first pass: every collective comes at the same place on all ranks.
        passes = len(packed) if self._sharded is None else self._sharded.passes(len(packed))
        for adapter, batch in packed:
            # Held through the backward pass: what is computed again there needs it, too.
            with active(self._model, adapter):
                logp_T, entropy_T = self._scores(batch, temperature)
                scored = Scored(logp_T, entropy_T, batch.sample_T, batch.offset_T, batch.inputs)
                _visited(scored, visit)
            tick()
        for _ in range(len(packed), passes):
            self._idle()
            tick()

    def _scores(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        def compute(lm: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
            logp_T, entropy_T = self._computed(lm, batch, temperature)
            return logp_T.clone(), entropy_T  # no view: FSDP can't follow one

        if self._recompute is not None:
            self._recompute.plan = self.plan(batch.inputs)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=computes_bf16(self._learner, self._device)):
            return compute(causal_lm(self._model)) if self._sharded is None else self._sharded(compute)

    def _idle(self) -> None:
        """A pass without effect, while another rank makes one of its own."""
        (batch,) = self._packed([BLANK])
        logp_T, _ = self._scores(batch.to(self._device), 1.0)
        _nothing(logp_T)

    def _grouped(self, samples: Sequence[TrainSample]) -> list[tuple[str, Batch]]:
        """Microbatches, each with the adapter that all its samples belong to."""
        members: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            members.setdefault(adapter_of(sample.role, self._adapters), []).append(index)
        packed = []
        for adapter, indices in members.items():
            where = torch.tensor(indices)
            batches = self._packed([samples[i] for i in indices])
            packed += [(adapter, dataclasses.replace(b, sample_T=where[b.sample_T])) for b in batches]
        return packed

    def _packed(self, samples: Sequence[TrainSample]) -> list[Batch]:
        raise NotImplementedError

    def _computed(self, lm: torch.nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class Plain(OfModules[Microbatch]):
    """The model's own forward pass, with its prompts shared in small trees (`packing`)."""

    name, path = "plain", "plain"

    def _packed(self, samples: Sequence[TrainSample]) -> list[Microbatch]:
        return pack(samples, self._learner.microbatch_tokens)

    def _computed(
        self, lm: torch.nn.Module, batch: Microbatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = memory.logits_at_once(on_gpu=self._device.type == "cuda")
        return batch_logprobs(lm, batch, temperature, chunk)


class Modules(OfModules[FlatBatch]):
    """`fused.ModuleDecoder` over flat rows, each sequence with its prompt; a row may lie on several ranks."""

    name, path = "modules", "modules"

    def __init__(
        self,
        model: torch.nn.Module,
        learner: Learner,
        device: torch.device,
        sharded: ShardedModel | None = None,
        ranks: context.Context | None = None,
    ) -> None:
        super().__init__(model, learner, device, sharded)
        self.decoder = ModuleDecoder(causal_lm(model), ranks)
        self._ranks = ranks

    def _packed(self, samples: Sequence[TrainSample]) -> list[FlatBatch]:
        made = bundle(samples, self._learner.microbatch_tokens, share=False)
        batches = [batch for one in made for batch in one.batches]
        return batches if self._ranks is None else [self._ranks.cut(batch) for batch in batches]

    def _computed(self, lm: torch.nn.Module, batch: FlatBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TH = self.decoder(batch, _computed_in(self._learner, self._device))
        return _head_scores(lm, hidden_TH.index_select(0, batch.predict_N), batch, temperature)


class FusedPasses:
    """`fused.FusedDecoder` over flat rows, each group's prompt computed once: where the gradients of the first two
    samples with one prompt are those of the same with a prompt each.
    """

    name = "fused"

    def __init__(
        self,
        model: torch.nn.Module,
        learner: Learner,
        device: torch.device,
        ranks: context.Context | None = None,
    ) -> None:
        self._learner, self._device, self._ranks = learner, device, ranks
        self._model = model
        self._causal_lm = causal_lm(model)
        offload = learner.offload_activations
        self.decoder = FusedDecoder(self._causal_lm, adapter_names(model)[0], ranks, offload)
        itemsize = next(self._causal_lm.parameters()).element_size()
        self.shape = memory.shape_of(self._causal_lm.config, itemsize, "fused", offload)
        self._room = _room(model, learner, device)
        self._unadapted = Modules(model, learner, device, ranks=ranks)
        self.shares_prompts = learner.share_prompts and ranks is None
        self._is_held_against = False

    def plan(self, tokens: int) -> memory.MemoryPlan:
        """What a microbatch of so many tokens keeps for its backward pass."""
        return memory.planned(self._learner.activation_checkpointing, self.shape, tokens, self._room.bytes)

    def run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None:
        if not _is_adapted(self._model):
            self._unadapted.run(samples, temperature, visit, tick)
            return
        with self._room.watched():
            if self.shares_prompts and not self._is_held_against and torch.is_grad_enabled():
                self._hold_against(sharing(samples), temperature, tick)
            self._run(samples, temperature, visit, tick, self.shares_prompts)

    def _hold_against(self, pair: Sequence[TrainSample], temperature: float, tick: Tick) -> None:
        """Libraries' attention has wrong gradients in some shapes, and with a shared prompt it is asked for others."""
        if not pair:
            return
        self._is_held_against = True
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]

        def apart(scored: Scored) -> torch.Tensor:
            return (scored.log_pi_T * (1.0 - 2.0 * scored.sample_T)).sum()

        found = []
        for shares in (False, True):
            for p in parameters:
                p.grad = None
            self._run(pair, temperature, apart, tick, shares)
            found.append([p.grad for p in parameters])
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        off = _distance(*found)
        if off > SHARED_MAY_DIFFER:
            self.shares_prompts = False
            because = f"with a prompt computed once, gradients are {100 * off:.0f} % off those with one a sample"
            log.warning("prompts are computed once a sample", because=because, so="an update takes longer")

    def _run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick, share: bool) -> None:
        self.decoder.refresh()
        # Packed and sent one by one: the host prepares a bundle while the device computes those before it.
        for cpu in bundle(samples, self._learner.microbatch_tokens, share):
            if self._ranks is not None:
                cpu = Bundle([self._ranks.cut(batch) for batch in cpu.batches])
            made = cpu.to(self._device)
            if made.prompt is None:
                self._batches(made, [], None, temperature, visit, tick)
            else:
                self._continued(made, made.prompt, temperature, visit, tick)

    def _continued(self, made: Bundle, prompt: FlatBatch, temperature: float, visit: Visit, tick: Tick) -> None:
        """A prompt, everything that continues it, then the prompt's backward pass."""
        plan = self.plan(prompt.inputs + max(batch.inputs for batch in made.batches))
        collected: list[tuple[torch.Tensor, torch.Tensor]] = []
        last_1H = self.decoder(prompt, None, plan, collected, prompt.predict_N)
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
        shared = 0 if prompt is None else prompt.inputs
        for number, batch in enumerate(made.batches):
            near = [leaf.to(self.decoder.dtype) for leaf in leaves]
            prefix = list(zip(near[:-1:2], near[1:-1:2], strict=True)) or None
            is_first_N = batch.predict_N == batch.inputs  # predicted by the shared prompt's last token
            rows_N = batch.predict_N.masked_fill(is_first_N, 0)
            hidden_NH = self.decoder(batch, prefix, self.plan(shared + batch.inputs), wanted_N=rows_N)
            if near:
                hidden_NH = torch.where(is_first_N[:, None], near[-1], hidden_NH)
            scores = _head_scores(self._causal_lm, self.decoder.normed(hidden_NH), batch, temperature)
            inputs = batch.inputs + (shared if number == 0 else 0)
            _visited(Scored(*scores, batch.sample_T, batch.offset_T, inputs), visit)
            tick()


def sharing(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The two longest of those with the longest prompt that several have; none where each has its own."""
    groups = by_prompt(samples)
    several = [prompt for prompt, group in groups.items() if len(group) > 1 and len(prompt) >= LEAST_SHARED]
    longest = groups[max(several, key=len)] if several else []
    return sorted((samples[i] for i in longest), key=lambda sample: -len(sample.token_ids))[:2]


def _distance(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> float:
    """Of two gradients, as a share of the first; waits for the device."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if len(pairs) < sum(a is not None for a in (*one, *other)) / 2:
        return float("inf")
    far = torch.stack([(a - b).float().square().sum() for a, b in pairs]).sum()
    whole = torch.stack([a.float().square().sum() for a, _ in pairs]).sum()
    return float((far / whole.clamp_min(1e-30)).sqrt())


def _head_scores(
    lm: torch.nn.Module, hidden_NH: torch.Tensor, batch: FlatBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    head = lm.get_output_embeddings()  # type: ignore[operator]
    vocabulary, chunk = head.weight.shape[0], memory.logits_at_once(on_gpu=hidden_NH.is_cuda)
    return token_logprobs(hidden_NH, head, batch.target_N, temperature, vocabulary, chunk)


def _visited(scored: Scored, visit: Visit) -> None:
    """`visit` and the backward pass: of nothing, where this rank scores none of a row's tokens."""
    if not len(scored.sample_T):
        _nothing(scored.log_pi_T)
    elif (loss := visit(scored)) is not None:
        loss.backward()  # type: ignore[no-untyped-call]


def _nothing(logp_T: torch.Tensor) -> None:
    """A backward pass without effect, in which other ranks may wait for this one."""
    if logp_T.requires_grad:
        (logp_T * 0.0).sum().backward()  # type: ignore[no-untyped-call]


def _is_adapted(model: torch.nn.Module) -> bool:
    """The adapter is switched on; peft's `disable_adapter` switches it off for a reference."""
    layers = (m for m in model.modules() if hasattr(m, "lora_A"))
    return not any(getattr(layer, "disable_adapters", False) for layer in layers)


def _room(model: torch.nn.Module, learner: Learner, device: torch.device) -> memory.ActivationRoom:
    """For activations: what may be held, less what is held already and what the first update adds to it."""
    if device.type != "cuda":
        return memory.ActivationRoom(learner.memory_gb * 1e9 or float("inf"), 0.0)
    limit = learner.memory_gb * 1e9 or 0.9 * torch.cuda.get_device_properties(device).total_memory
    taken = torch.cuda.memory_allocated(device) + _update_bytes(model, learner, device)
    return memory.ActivationRoom(limit, taken, functools.partial(torch.cuda.max_memory_allocated, device))


def _update_bytes(model: torch.nn.Module, learner: Learner, device: torch.device) -> float:
    return update_bytes(model, computes_bf16(learner, device), eight_bit=learner.optimizer == "adamw_8bit")


def update_bytes(model: torch.nn.Module, bf16: bool, *, eight_bit: bool = False) -> float:
    """Beside the weights and activations: gradients, AdamW's two moments, and the copies that autocast makes of fp32
    weights for a pass in `bf16`. Of a sharded model this rank's, and what is whole while it is computed: what is no
    layer's, and three layers with a gradient."""
    parameters = list(model.parameters())
    own: list[torch.Tensor] = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    held = [p for p in own if p.requires_grad and not p.is_cpu]
    trained = float(sum(p.nbytes + (memory.PACKED_MOMENTS * p.numel() if eight_bit else 2 * p.nbytes) for p in held))
    if not any(isinstance(p, DTensor) for p in parameters):
        return trained + (sum(p.nbytes for p in own if p.dtype == torch.float32) / 2 if bf16 else 0)
    layers = decoder_layers(causal_lm(model))
    in_layers = sum(p.numel() for layer in layers for p in layer.parameters())
    itemsize = 2 if bf16 else 4
    outside = itemsize * (sum(p.numel() for p in parameters) - in_layers)
    return float(trained + outside + (3 * itemsize + 4) * in_layers / max(1, len(layers)))


def forward_backward(
    model: torch.nn.Module, learner: Learner, device: torch.device, sharded: ShardedModel | None = None
) -> ForwardBackward:
    """What `learner.kernels` names; `auto` is fused on a GPU where the model's family allows it, else plain.

    :raises ConfigError: `fused`, or rows on several ranks, can't be had.
    """
    spreads = learner.context_parallel > 1
    if learner.kernels == "plain" or (learner.kernels == "auto" and device.type != "cuda" and not spreads):
        refused = "learner.kernels is plain"
    else:
        refused = families.why_not(model)
    if not refused and spreads:
        refused = context.why_not(causal_lm(model).config, learner.context_parallel)
    if refused and (spreads or learner.kernels == "fused"):
        asked = f"learner.context_parallel={learner.context_parallel}" if spreads else "learner.kernels=fused"
        cure = "Use learner.context_parallel=1" if spreads else "Use auto or plain"
        raise ConfigError(f"{asked} can't be had for this model: {refused}", cure)
    if refused:
        if learner.kernels == "auto" and device.type == "cuda":
            log.warning("the learner computes by the model's own modules", because=refused, so="slower than fused")
        return Plain(model, learner, device, sharded).recomputing()
    ranks = context.join(learner.context_parallel) if spreads else None
    by_ranks = "" if sharded is None else "its weights are sharded over the ranks"
    refused = by_ranks or families.why_not_by_hand(model) or _wrong_precision(model, learner, device)
    if not refused:
        return FusedPasses(model, learner, device, ranks)
    return Modules(model, learner, device, sharded, ranks).recomputing()


def _wrong_precision(model: torch.nn.Module, learner: Learner, device: torch.device) -> str:
    held = causal_lm(model).get_decoder().embed_tokens.weight.dtype  # type: ignore[operator]
    bf16 = computes_bf16(learner, device)
    if bf16 != (held == torch.bfloat16):
        return f"its weights are {held} and the arithmetic is {'bf16' if bf16 else 'fp32'}"
    return ""
