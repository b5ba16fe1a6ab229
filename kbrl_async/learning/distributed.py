"""Several processes, one GPU each, that make one update together: every rank its share of the sequences.

::

    rank 0   Trainer.step ─ lead: batch, weights, moments ─▶ its share ─┐
    rank r        follow ─────────────────────────────────▶ its share ─┴─ gradients summed ─▶ the same step everywhere

Invariants
* Rank 0 decides: which batch, in which order, when to save and where to go back to. The others do what they are told,
  in the same order, for a collective that one rank makes alone never ends.
* Where weights stand on every rank, every update begins with rank 0's weights and moments: what it restored or refused
  in between needs no telling, and only it writes checkpoints. Where they are sharded (`sharded`), each rank's share is
  its own, and every rank is told what rank 0 restores or saves.
* Weights of a minibatch are those of the whole minibatch, so the summed gradient is that of one process.
* Sequences of a group stay neighbours, so that their prompt is shared on a rank.
"""

# ruff: noqa: N803 - capital suffixes of names give tensor shapes
from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from kbrl_async.learning.training_state import empty_moments, forget_moments
from kbrl_async.weights.groups import Meeting
from protocols.records import TrainGroup

IDLE = datetime.timedelta(days=30)
"""Ranks wait so long for rank 0's next batch: a run may be paused. A rank that dies is seen by its parent."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """One update. Where weights stand on every rank, they and the moments follow."""

    groups: list[TrainGroup]
    temperature: float
    version: int | None
    optimizer_step: int
    data_order: bytes
    has_moments: bool


class Probe(msgspec.Struct, frozen=True, tag=True):
    """The log-probs of these token ids, which rank 0 can't compute alone."""

    ids: list[int]


class Save(msgspec.Struct, frozen=True, tag=True):
    """Every rank's share, into this folder."""

    folder: str


class LoadShares(msgspec.Struct, frozen=True, tag=True):
    """Every rank's share, out of this folder, whose files have these SHA-256."""

    folder: str
    files: dict[str, str]


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Where samplers are met, to whom every rank sends its rows of a version from now on, in this number format."""

    meeting: Meeting
    dtype: str
    patience_s: float
    two_copies: bool = False
    """Of its rows each rank will hold as many."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Every rank's rows as they are now are this version's; of those before it, these are still read."""

    version: int
    keep: list[int]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """No rank sends anything to samplers any more: the meeting ends."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """All trained weights, to rank 0."""


class End(msgspec.Struct, frozen=True, tag=True):
    """There is no more to do."""


Order = Train | Probe | Save | LoadShares | Meet | Hold | Leave | Gather | End


class Replica(Protocol):
    """What of a trainer is alike on every rank where weights are not sharded: `trainer.Trainer` fits."""

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer


class ProcessGroup:
    """This process's place among the ranks."""

    def __init__(self, device: torch.device) -> None:
        """Joins the ranks that the environment names as torchrun does: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl")  # what is offloaded is reduced on the host
            self._control: Any = dist.new_group(backend="gloo", timeout=IDLE)
        else:
            dist.init_process_group("gloo", timeout=IDLE)
            self._control = dist.group.WORLD
        self.background: Any = dist.new_group(backend="gloo", timeout=IDLE)
        """For what is done beside updates, such as writing a checkpoint."""
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def close(self) -> None:
        """Rank 0: lets the others go. Every rank: leaves."""
        if self.rank == 0:
            self.tell(End())
        dist.destroy_process_group()

    def send_text(self, text: str) -> None:
        """Rank 0: `text` to all others, which wait for it in `receive_text`."""
        self._send_bytes(text.encode())

    def receive_text(self) -> str:
        return self._receive().decode()

    # ── an update ────────────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, order: Order) -> None:
        """Rank 0: has the others do what it does next itself."""
        self._send_bytes(msgspec.msgpack.encode(order))

    def orders(self) -> Iterator[Order]:
        """Other ranks: what rank 0 tells, until it says that there is no more."""
        decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
        while not isinstance(order := decoder.decode(self._receive()), End):
            yield order

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
        sums = []
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            sums.append(dist.all_reduce(p.grad, async_op=True))
        for pending in sums:
            pending.wait()

    def all_agree(self, is_well: bool) -> bool:
        """Whether it is so on every rank."""
        return self.most(0 if is_well else 1) == 0

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
    def share_state(self, trainer: Replica, has_moments: bool) -> None:
        """Rank 0's weights and moments, to every rank that holds them whole."""
        for parameter in trainer.parameters.values():
            dist.broadcast(parameter.data, 0)
            if not has_moments:
                forget_moments(trainer.optimizer, parameter)
                continue
            for _, held in sorted(empty_moments(trainer.optimizer, parameter).items()):
                dist.broadcast(held, 0)

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
