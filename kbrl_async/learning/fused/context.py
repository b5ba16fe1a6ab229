"""Context parallelism: the tokens of one row lie on several ranks, which exchange heads for tokens around attention.

::

    rank r holds tokens r, r+N, r+2N …, all heads ─all to all─▶ all tokens, 1/N of the heads ─ attention ─▶ and back

Everything but attention is a token's own, so a rank computes 1/N of a row's matrix products, norms and head, and keeps
1/N of its activations. Tokens go round the ranks in turn, so each has its share of the responses, too. The exchange is
DeepSpeed-Ulysses' (Jacobs et al. 2023).

Invariants
* All ranks of a context make the same passes over the same rows in the same order.
* Every response token is scored on exactly one rank: losses, metrics and gradients of the ranks add up.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes: S a rank's tokens, T all, N heads, M a rank's
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kbrl_async.errors import ConfigError
from kbrl_async.learning.fused.flat import FlatBatch


class Context(NamedTuple):
    """This process's place among the ranks that share its rows."""

    rank: int
    size: int
    group: Any

    def cut(self, batch: FlatBatch) -> FlatBatch:
        """This rank's tokens of a row, filled up to a multiple of the ranks by a segment that nobody scores.

        Where none of its tokens predicts a response's, it gets one to compute (`predict_N`) and none to score.
        """
        spare = -len(batch.input_T) % self.size
        lengths = (*batch.lengths, spare) if spare else batch.lengths
        input_T, position_T = (torch.nn.functional.pad(x, (0, spare)) for x in (batch.input_T, batch.position_T))
        mine_N = batch.predict_N % self.size == self.rank
        predict_N, target_N = batch.predict_N[mine_N] // self.size, batch.target_N[mine_N]
        if not len(predict_N):
            predict_N = target_N = torch.zeros(1, dtype=torch.long)
        return FlatBatch(
            input_T[self.rank :: self.size],
            position_T[self.rank :: self.size],
            lengths,
            predict_N,
            target_N,
            batch.sample_T[mine_N],
            batch.offset_T[mine_N],
        )

    def spread(self, x_SND: torch.Tensor) -> torch.Tensor:
        """[S, N, D] of all heads → [T, M, D], all tokens of this rank's heads."""
        out: torch.Tensor = _ToHeads.apply(x_SND, self)  # type: ignore[no-untyped-call]
        return out

    def gathered(self, x_TMD: torch.Tensor) -> torch.Tensor:
        """The way back."""
        out: torch.Tensor = _ToTokens.apply(x_TMD, self)  # type: ignore[no-untyped-call]
        return out

    def widened(self, k_SND: torch.Tensor) -> torch.Tensor:
        """k or v with each head as often as it takes for every rank to have one."""
        heads = k_SND.shape[1]
        return k_SND if heads % self.size == 0 else k_SND.repeat_interleave(self.size // heads, 1)


def join(size: int) -> Context:
    """The ranks in runs of `size` neighbours; every rank calls it.

    :raises ConfigError: they don't come out even.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks % size:
        raise ConfigError(
            f"learner.context_parallel={size} with {ranks} learner processes", f"Add learner.processes={size}"
        )
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    rank = dist.get_rank()
    return Context(rank % size, size, groups[rank // size])


def why_not(config: Any, size: int) -> str:
    """Why heads can't be shared by so many ranks; empty where they can."""
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    if heads % size or (kv_heads % size and size % kv_heads):
        return f"its {heads} heads ({kv_heads} of keys) do not divide by {size}"
    return ""


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SND: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        return _to_heads(x_SND, context)

    @staticmethod
    def backward(ctx: Any, gradient_TMD: torch.Tensor) -> Any:
        return _to_tokens(gradient_TMD, ctx.context), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TMD: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        return _to_tokens(x_TMD, context)

    @staticmethod
    def backward(ctx: Any, gradient_SND: torch.Tensor) -> Any:
        return _to_heads(gradient_SND, ctx.context), None


def _to_heads(x_SND: torch.Tensor, context: Context) -> torch.Tensor:
    count, heads, depth = x_SND.shape
    mine_RSMD = x_SND.view(count, context.size, heads // context.size, depth).transpose(0, 1)
    return _exchanged(mine_RSMD, context).transpose(0, 1).flatten(0, 1)


def _to_tokens(x_TMD: torch.Tensor, context: Context) -> torch.Tensor:
    count, heads, depth = x_TMD.shape
    mine_RSMD = x_TMD.view(count // context.size, context.size, heads, depth).transpose(0, 1)
    return _exchanged(mine_RSMD, context).transpose(0, 1).flatten(1, 2)


def _exchanged(parts_RSMD: torch.Tensor, context: Context) -> torch.Tensor:
    """Part r to rank r, and from each rank its part for this one."""
    sent = parts_RSMD.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.group)
    return received
