"""Causal attention of packed sequences: one flat row of tokens, every sequence seeing itself and its prefix only.

::

    flat row   a a a a | b b b       each segment is a call of its own: no mask, no padding, nothing computed in vain
    prefix     P P P                 k and v of a shared prompt stand in front of every segment's

Which kernel does it is measured once a shape class on a GPU: cuDNN, flash (grouped heads or expanded ones) differ by
up to two between cards and versions, and some have wrong gradients there. On a CPU it is torch's own.

Invariants
* A segment's result doesn't depend on what else is in the row.
* On a GPU nothing computes a gradient that was not held against fp32 in this process, on this card (`error_of`).
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes: T tokens, N heads, D head dimension
from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kbrl_async.learning.fused.context import Context

BUCKET = 256
"""cuDNN makes a plan for each length, tenths of a second: lengths are rounded up. A causal query can't see padding."""
TOLERANCE = 0.02
"""Of output and gradients, relative to their norms: .002 to .011 in bf16 where they are right, 1.4 where not (H200)."""
CHECKED_LENGTHS = 8192, 1024
"""Longest segment that is held against fp32, and that where there is no memory for it: all scores of a head are
written out, 1.1 GB of the longer one, beside whatever the learner holds. A kernel was right at 1,024 only."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
KeysValues = tuple[torch.Tensor, torch.Tensor]
"""k and v [P, kv heads, D]."""


def attend(
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TND: torch.Tensor,
    lengths: Sequence[int],
    prefix: KeysValues | None = None,
    context: Context | None = None,
) -> torch.Tensor:
    """[T, heads · D]. `lengths` of the segments add up to T; `prefix` is k and v [P, kv heads, D], seen by all.

    With `context`, q, k, v and the result are this rank's tokens of a row that has T, and there is no prefix.
    """
    if context is not None:
        q_TND, k_TND, v_TND = (context.spread(x) for x in (q_TND, context.widened(k_TND), context.widened(v_TND)))
    split = [torch.split(x, list(lengths)) for x in (q_TND, k_TND, v_TND)]
    parts = [_segment(q, k, v, prefix) for q, k, v in zip(*split, strict=True)]
    out_TND = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (out_TND if context is None else context.gathered(out_TND)).flatten(1)


def _segment(
    q_LND: torch.Tensor,
    k_LND: torch.Tensor,
    v_LND: torch.Tensor,
    prefix: KeysValues | None,
    by: Attend | None = None,
) -> torch.Tensor:
    length = len(q_LND)
    before = 0 if prefix is None else len(prefix[0])
    if prefix is not None:
        k_LND, v_LND = torch.cat((prefix[0], k_LND)), torch.cat((prefix[1], v_LND))
    chosen = by or _chosen(q_LND, k_LND)
    behind = -len(k_LND) % BUCKET if q_LND.is_cuda else 0
    if before or behind:
        # Queries of the prefix's places are made up: plain causal kernels are the fastest there are, and exact.
        q_LND = _padded(q_LND, before, behind)
        k_LND, v_LND = _padded(k_LND, 0, behind), _padded(v_LND, 0, behind)
    out_NLD = chosen(*(x.transpose(0, 1)[None] for x in (q_LND, k_LND, v_LND)))[0]
    return out_NLD.transpose(0, 1)[before : before + length]


def _padded(x_LND: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    if not before and not behind:
        return x_LND
    return torch.nn.functional.pad(x_LND, (0, 0, 0, 0, before, behind))


def _chosen(q_LND: torch.Tensor, k_LND: torch.Tensor) -> Attend:
    if not q_LND.is_cuda:
        return plain
    length = 1 << max(9, (len(k_LND) - 1).bit_length())
    return CANDIDATES[fastest(q_LND.shape[1], k_LND.shape[1], q_LND.shape[2], length, q_LND.dtype, q_LND.device)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _by(backend: SDPBackend, expand: bool) -> Attend:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if expand:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not expand)

    return run


CANDIDATES: dict[str, Attend] = {
    "cudnn": _by(SDPBackend.CUDNN_ATTENTION, expand=False),
    "cudnn, heads expanded": _by(SDPBackend.CUDNN_ATTENTION, expand=True),
    "flash": _by(SDPBackend.FLASH_ATTENTION, expand=False),
    "flash, heads expanded": _by(SDPBackend.FLASH_ATTENTION, expand=True),
    "math": _by(SDPBackend.MATH, expand=False),
}
"""Adding one is a line: q, k, v [1, heads, L, D] to [1, heads, L, D], causal."""


class MeasuredKernel(NamedTuple):
    """What was measured of a candidate at one shape."""

    seconds: float
    error: float


def best(found: Mapping[str, MeasuredKernel]) -> str:
    """The fastest of those that are right; the least wrong where none is.

    >>> best({"fast": Found(1.0, 0.3), "right": Found(2.0, 0.004), "slow": Found(3.0, 0.003)})
    'right'
    """
    right = [name for name, one in found.items() if one.error <= TOLERANCE]
    if not right:
        return min(found, key=lambda name: found[name].error)
    return min(right, key=lambda name: found[name].seconds)


@functools.cache
def fastest(heads: int, kv_heads: int, depth: int, length: int, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the fastest candidate that is right here, forward and backward. Synchronises; measured once."""
    was_strict = torch.cuda.get_sync_debug_mode()
    _wait_allowed(0)
    found: dict[str, MeasuredKernel] = {}
    shape = (heads, kv_heads, depth, min(length, 8192), dtype, device)
    try:
        # Who asks may be inside of a checkpoint, which counts what is kept: this is not done again with it.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            for name, candidate in CANDIDATES.items():
                if name == "math" and any(one.error <= TOLERANCE for one in found.values()):
                    continue
                seconds = _seconds(candidate, *shape)
                if seconds is not None:
                    found[name] = MeasuredKernel(seconds, error_of(candidate, *shape))
    finally:
        _wait_allowed(was_strict)
    return best(found)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _wait_allowed(mode: int) -> None:
    if mode != torch.cuda.get_sync_debug_mode():
        with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode(mode)


@torch.enable_grad()
def error_of(
    candidate: Attend,
    heads: int,
    kv_heads: int,
    depth: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Largest relative error of output, dq, dk, dv and the prefix's gradients against fp32 on the same values.

    As `attend` calls it: padded, with a prefix and without, once with deeply negative scores, where backward passes
    of libraries were seen to fail.
    """
    generator = torch.Generator(device)

    def drawn(rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows, count, depth, device=device, generator=generator).to(dtype)

    def errors(length: int) -> Iterator[float]:
        generator.manual_seed(0)
        for before, shift in ((0, 0.0), (0, 3.0), (length // 3, 0.0)):
            own = length - before
            given = [drawn(own, heads) + shift, drawn(own, kv_heads) - shift, drawn(own, kv_heads)]
            given += [drawn(before, kv_heads), drawn(before, kv_heads)] if before else []
            pull = drawn(own, heads)
            with torch.autocast(device.type, enabled=False):  # which would write the yardstick out in bf16
                got, exact = _results(candidate, given, pull), _exact_results(given, pull)
            for mine, theirs in zip(got, exact, strict=True):
                yield float((mine.float() - theirs).norm() / theirs.norm())

    longest, else_longest = (min(length, checked) - 100 for checked in CHECKED_LENGTHS)
    try:
        found = list(errors(longest))
    except torch.OutOfMemoryError:
        found = list(errors(else_longest))
    return max(found) if all(map(math.isfinite, found)) else math.inf


def _results(candidate: Attend, given: list[torch.Tensor], pull: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of what was given."""
    q, k, v, *ahead = (x.detach().requires_grad_() for x in given)
    out = _segment(q, k, v, (ahead[0], ahead[1]) if ahead else None, candidate)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, *ahead), pull)]


def _exact_results(given: list[torch.Tensor], pull: torch.Tensor) -> list[torch.Tensor]:
    """The same in fp32, one head after the other: all heads' scores at once would fill a GPU."""
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (pull, *given)]
    heads, kv_heads = given[0].shape[1], given[1].shape[1]
    for head in range(heads):
        group = head * kv_heads // heads
        own = [slice(head, head + 1)] * 2 + [slice(group, group + 1)] * (len(given) - 1)
        one = [x[:, where].float() for x, where in zip(given, own[1:], strict=True)]
        for all_heads, where, part in zip(found, own, _results(_exact, one, pull[:, own[0]].float()), strict=True):
            all_heads[:, where] += part
    return found


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Written out: the yardstick must be no library's."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out: torch.Tensor = scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v
    return out


@torch.enable_grad()
def _seconds(
    candidate: Attend, heads: int, kv_heads: int, depth: int, length: int, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Of a forward and backward pass, the best of three; None where the candidate refuses this shape."""
    made = [torch.randn(length, n, depth, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (x.requires_grad_().transpose(0, 1)[None] for x in made)
    best = float("inf")
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch, why a backend can't do it
            for _ in range(4):  # the first one makes plans
                torch.cuda.synchronize(device)
                started = time.perf_counter()
                out = candidate(q, k, v)
                torch.autograd.grad(out, (q, k, v), out)
                torch.cuda.synchronize(device)
                best = min(best, time.perf_counter() - started)
    except RuntimeError:  # "No available kernel"
        return None
    return best
