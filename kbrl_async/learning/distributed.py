"""Several processes, one GPU each, that make one update together: every rank its share of the sequences.

::

    rank 0   Trainer.step ─ lead: batch, weights, moments ─▶ its share ─┐
    rank r        follow ─────────────────────────────────▶ its share ─┴─ gradients summed ─▶ the same step everywhere

Invariants
* Rank 0 is the truth: every update begins with its weights, optimizer and data order. What it restored or refused in
  between needs no telling, and only it writes checkpoints and versions.
* Weights of a minibatch are those of the whole minibatch, so the summed gradient is that of one process.
* Sequences of a group stay neighbours, so that their prompt is shared on a rank.

Weights stand on every rank, or are sharded over them where they don't fit::

    rank 0   ¼ of every layer ─┐  layer n: gather ─▶ whole ─▶ forward or backward ─▶ ¼ again
    rank 1   ¼ of every layer ─┴─ …

* All ranks make the same passes in the same order: a pass that one rank makes alone never ends. Who has fewer
  microbatches makes idle passes; what rank 0 computes between updates, the others compute with it.
* Between passes every rank holds its share and no more.
* Adapters stay whole on every rank: optimizer, checkpoints and versions know nothing of shards.
"""

# ruff: noqa: N803 - capital suffixes of names give tensor shapes
from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from kbrl_async.errors import ConfigError, NonFiniteLoss
from kbrl_async.learning.policies.models import causal_lm, is_lora
from protocols.records import TrainGroup

Result = TypeVar("Result")
IDLE = datetime.timedelta(days=30)
"""Ranks wait so long for rank 0's next batch: a run may be paused. A rank that dies is seen by its parent."""


class Order(msgspec.Struct, frozen=True):
    """What rank 0 sends before its tensors. Neither groups nor a probe: the end."""

    groups: list[TrainGroup] = msgspec.field(default_factory=list)
    temperature: float = 1.0
    version: int | None = None
    optimizer_step: int = 0
    data_order: bytes = b""
    has_moments: bool = False
    probe: list[int] = msgspec.field(default_factory=list)
    """Token ids whose log-probs rank 0 wants, where it can't compute without the others."""


class Replica(Protocol):
    """What of a trainer is alike on every rank: `trainer.Trainer` fits."""

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.AdamW
    optimizer_step: int
    order: torch.Generator

    def update(
        self, groups: Sequence[TrainGroup], temperature: float, *, version: int | None = None
    ) -> dict[str, float]: ...
    def sequence_logprobs(self, ids: list[int]) -> list[float]: ...


class ProcessGroup:
    """This process's place among the ranks."""

    def __init__(self, device: torch.device) -> None:
        """Joins the ranks that the environment names as torchrun does: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl")
            self._control: Any = dist.new_group(backend="gloo", timeout=IDLE)
        else:
            dist.init_process_group("gloo", timeout=IDLE)
            self._control = dist.group.WORLD
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def close(self) -> None:
        """Rank 0: lets the others go. Every rank: leaves."""
        if self.rank == 0:
            self._send(Order())
        dist.destroy_process_group()

    def send_text(self, text: str) -> None:
        """Rank 0: `text` to all others, which wait for it in `receive_text`."""
        self._send_bytes(text.encode())

    def receive_text(self) -> str:
        return self._receive().decode()

    # ── an update ────────────────────────────────────────────────────────────────────────────────────────────────

    def lead(self, trainer: Replica, groups: Sequence[TrainGroup], temperature: float, version: int | None) -> None:
        """Rank 0: what the others need for the update that it is about to make."""
        has_moments = bool(trainer.optimizer.state)
        data_order = trainer.order.get_state().numpy().tobytes()
        self._send(Order(list(groups), temperature, version, trainer.optimizer_step, data_order, has_moments))
        self._state(trainer, has_moments)

    def probe(self, ids: list[int]) -> None:
        """Rank 0: has the others join in computing the log-probs of `ids`."""
        self._send(Order(probe=ids))

    def follow(self, trainer: Replica) -> None:
        """Other ranks: computes everything with rank 0, until it says that there is no more."""
        decoder = msgspec.msgpack.Decoder(Order)
        while (order := decoder.decode(self._receive())).groups or order.probe:
            if order.probe:
                trainer.sequence_logprobs(order.probe)
                continue
            self._state(trainer, order.has_moments)
            trainer.optimizer_step = order.optimizer_step
            trainer.order.set_state(torch.frombuffer(bytearray(order.data_order), dtype=torch.uint8))
            try:
                trainer.update(order.groups, order.temperature, version=order.version)
            except NonFiniteLoss:
                continue  # rank 0 has seen it too, and says what comes now

    def part(self, tokens: Sequence[int], together: int = 1) -> list[int]:
        """Indices of this rank's sequences: neighbours, about an equal share of `tokens`; rank 0 always has some.

        `together` ranks, neighbours, have the same ones.
        """
        rank, size = self.rank // together, self.size // together
        if len(tokens) <= size:
            return [rank] if rank < len(tokens) else []
        ends = list(itertools.accumulate(tokens))
        middles = [end - count / 2 for end, count in zip(ends, tokens, strict=True)]
        share = ends[-1] / size
        owners = [min(size - 1, int(middle // share)) for middle in middles]
        owners[0] = 0
        return [i for i, owner in enumerate(owners) if owner == rank]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = list(parameters)
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in trained if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        parts = torch.split(flat, [g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def most(self, count: int) -> int:
        """The largest of all ranks' counts."""
        largest = torch.tensor([count])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._control)
        return int(largest)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        summed = value.to(self.device, copy=True)
        dist.all_reduce(summed)
        return summed

    def gathered(self, columns_KT: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks beside each other. A rank without any gives [0, 0]."""
        mine = torch.tensor(columns_KT.shape, device=self.device)
        shapes = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(shapes, mine)
        counts = [[int(n) for n in shape] for shape in shapes]
        padded = torch.zeros(max(k for k, _ in counts), max(t for _, t in counts), device=self.device)
        padded[: columns_KT.shape[0], : columns_KT.shape[1]] = columns_KT
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:, :t] for part, (_, t) in zip(parts, counts, strict=True)], 1)

    # ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _state(self, trainer: Replica, has_moments: bool) -> None:
        for parameter in trainer.parameters.values():
            dist.broadcast(parameter.data, 0)
            if not has_moments:
                trainer.optimizer.state.pop(parameter, None)
                continue
            held = trainer.optimizer.state[parameter]
            if not held:
                held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                held["exp_avg"], held["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            for name in ("step", "exp_avg", "exp_avg_sq"):
                dist.broadcast(held[name], 0)

    def _send(self, order: Order) -> None:
        self._send_bytes(msgspec.msgpack.encode(order))

    def _send_bytes(self, content: bytes) -> None:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._control)
        dist.broadcast(data, 0, group=self._control)

    def _receive(self) -> bytes:
        length = torch.zeros(1, dtype=torch.long)
        dist.broadcast(length, 0, group=self._control)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._control)
        return data.numpy().tobytes()


# ── shards ──────────────────────────────────────────────────────────────────────────────────────────────────────


class ShardedModel:
    """A policy's weights sharded over ranks by FSDP2: each holds a share, and gathers a layer to compute it.

    The only way to compute with such a model: `sharded(lambda causal_lm: …)`, on every rank.
    """

    def __init__(self, model: torch.nn.Module, ranks: ProcessGroup) -> None:
        """Shards the frozen weights of `model`, which every rank has loaded alike, on the host or on its device."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not is_lora(model):
            raise ConfigError(
                "only frozen weights are sharded over ranks, and this policy has none", "Add lora_rank=32"
            )
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        adapters = {p for p in model.parameters() if p.requires_grad}
        inner = causal_lm(model)
        self._ranks, self._whole = ranks, _Whole(inner)
        # For the outermost, too: saving an adapter gives shares back, and rank 0 alone would gather once more after it.
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": adapters, "reshard_after_forward": True}
        for layer in inner.get_decoder().layers:  # type: ignore[operator]
            fully_shard(layer, **options)
        fully_shard(self._whole, **options)
        for parameter in adapters:
            parameter.data = parameter.data.to(ranks.device)

    def __call__(self, compute: Callable[[torch.nn.Module], Result]) -> Result:
        """`compute` of the causal LM, inside which all its weights are there."""
        result: Result = self._whole(compute)
        return result

    def passes(self, mine: int) -> int:
        """How many passes this rank has to make, if it needs `mine`."""
        return self._ranks.most(mine)


class _Whole(torch.nn.Module):
    """Gives FSDP a forward pass around whatever is computed, the head's product included."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, compute: Callable[[torch.nn.Module], Any]) -> Any:
        return compute(self.inner)
