"""Decoding by CUDA graphs: one step of a continuous batch as one launch instead of hundreds.

::

    rows ─ padded to a bucket of rows and of length ─▶ fixed inputs ─▶ replay ─▶ logits of the real rows
                └─ a bucket's first uses go step by step; then it is captured; grown caches forget all graphs

A small model's step is bound by the time that Python takes to launch its kernels. A graph needs fixed shapes and
addresses: so rows are padded (the slots behind the last row are free, and what is written there is never read), and
attention reaches to the end of its bucket, masked beyond each row.

Invariants
* Nothing is captured on a device that is no GPU, and what can't be captured goes step by step from then on.
* The results are those of the same kernels on the same inputs; rows are independent of what stands in the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kbrl_async.sampling.transformers.kv_cache import SlotCache

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTH_STEP = 128
USES_BEFORE_CAPTURE = 3
MOST_GRAPHS = 48
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Tokens [N, 1], positions [N, 1] and mask to logits [N, V], with keys and values in the cache."""
Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], Replay]
_RunningSequence: Any = torch.cuda.Stream


def capture_on_gpu(step: Callable[[], torch.Tensor]) -> Replay:
    """Records the kernels of `step`, which must read and write the same tensors each time."""
    side: Any = _RunningSequence()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # libraries choose and allocate in their first calls, which must not be recorded
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads load the next version meanwhile; only this one's calls may not disturb the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


class _Bucket:
    """Fixed inputs of one shape: all that a graph reads by address, so they live as long as it does."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.rows, self.length = rows, length
        self.slots = torch.arange(rows, device=device)
        self.reach = torch.arange(length, device=device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, dtype=torch.long, device=device)
        self.uses = 0
        self.replay: Replay | None = None


class GraphedSteps:
    """One cohort's decoding steps. `forward` runs the model on the cache."""

    def __init__(
        self, forward: Forward, cache: SlotCache, device: torch.device, capture: Capture = capture_on_gpu
    ) -> None:
        self._forward, self._cache, self._device, self._capture = forward, cache, device, capture
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._layout = -1
        self.captured = 0
        self.failure = ""
        """Why steps are not captured any more; empty while they are."""

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor | None:
        """Logits [N, V] of the newest token of each row; None where this step has to go the plain way."""
        if self.failure or len(tokens) > ROWS[-1]:
            return None
        rows = next(size for size in ROWS if size >= len(tokens))
        length = -(-(max(positions) + 1) // LENGTH_STEP) * LENGTH_STEP
        self._cache.reserve(rows, length)
        if self._cache.layout != self._layout:
            self._buckets.clear()
            self._layout = self._cache.layout
        bucket = self._buckets.get((rows, length))
        if bucket is None:
            if len(self._buckets) >= MOST_GRAPHS:
                return None
            bucket = self._buckets[rows, length] = _Bucket(rows, length, self._device)
        bucket.uses += 1
        if bucket.uses <= USES_BEFORE_CAPTURE:
            return None
        self._fill(bucket, tokens, positions)
        replay = bucket.replay or self._captured(bucket)
        return None if replay is None else replay()[: len(tokens)]

    def _fill(self, bucket: _Bucket, tokens: Sequence[int], positions: Sequence[int]) -> None:
        padding = [0] * (bucket.rows - len(tokens))
        bucket.tokens.copy_(torch.tensor([*tokens, *padding])[:, None])
        bucket.positions.copy_(torch.tensor([*positions, *padding]))

    def _captured(self, bucket: _Bucket) -> Replay | None:
        def step() -> torch.Tensor:
            self._cache.begin_fixed(bucket.slots, bucket.positions, bucket.length)
            mask = (bucket.reach[None] <= bucket.positions[:, None])[:, None, None]
            return self._forward(bucket.tokens, bucket.positions[:, None], mask)

        try:
            bucket.replay = self._capture(step)
        except RuntimeError as error:  # of CUDA: a model that synchronises or allocates in its step
            self.failure = str(error).splitlines()[0]
            self._buckets.clear()
            return None
        self.captured += 1
        return bucket.replay
