"""Causal attention of packed sequences: one flat row of tokens, every sequence seeing itself and its prefix only.

::

    flat row   a a a a | b b b       each segment is a call of its own: no mask, no padding, nothing computed in vain
    prefix     P P P                 k and v of a shared prompt stand in front of every segment's

Which kernel does it is measured once a shape class on a GPU: cuDNN, flash (grouped heads or expanded ones) differ by
up to two between cards and versions. On a CPU it is torch's own.

Invariant: a segment's result doesn't depend on what else is in the row.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes: T tokens, N heads, D head dimension
from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BUCKET = 256
"""cuDNN makes a plan for each length, tenths of a second: lengths are rounded up. A causal query can't see padding."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(
    q_TND: torch.Tensor,
    k_TND: torch.Tensor,
    v_TND: torch.Tensor,
    lengths: Sequence[int],
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[T, heads · D]. `lengths` of the segments add up to T; `prefix` is k and v [P, kv heads, D], seen by all."""
    split = [torch.split(x, list(lengths)) for x in (q_TND, k_TND, v_TND)]
    parts = [_segment(q, k, v, prefix) for q, k, v in zip(*split, strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _segment(
    q_LND: torch.Tensor, k_LND: torch.Tensor, v_LND: torch.Tensor, prefix: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    length = len(q_LND)
    before = 0 if prefix is None else len(prefix[0])
    if prefix is not None:
        k_LND, v_LND = torch.cat((prefix[0], k_LND)), torch.cat((prefix[1], v_LND))
    chosen = _chosen(q_LND, k_LND)
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
        return _plain
    length = 1 << max(9, (len(k_LND) - 1).bit_length())
    return CANDIDATES[fastest(q_LND.shape[1], k_LND.shape[1], q_LND.shape[2], length, q_LND.dtype, q_LND.device)]


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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


@functools.cache
def fastest(heads: int, kv_heads: int, depth: int, length: int, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the fastest candidate that works here, forward and backward. Synchronises; measured once."""
    was_strict = torch.cuda.get_sync_debug_mode()
    _wait_allowed(0)
    seconds: dict[str, float] = {}
    try:
        for name, candidate in CANDIDATES.items():
            if name == "math" and seconds:
                continue
            found = _seconds(candidate, heads, kv_heads, depth, min(length, 8192), dtype, device)
            if found is not None:
                seconds[name] = found
    finally:
        _wait_allowed(was_strict)
    return min(seconds, key=lambda name: seconds[name])


def _wait_allowed(mode: int) -> None:
    if mode != torch.cuda.get_sync_debug_mode():
        with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode(mode)


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
