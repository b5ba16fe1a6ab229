"""vLLM's side of `sampling.forced`: a logits processor that leaves one token to draw. Loaded by vLLM's worker only.

Written against the interface of V1 logits processors of vLLM 0.26. `output_tok_ids` is the request's running list, so
its length is the place in the answer, whatever was preempted, resumed or scheduled ahead.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kbrl_async.sampling.forced import FORCED

_Base: Any = importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor


class Forcing(_Base):  # type: ignore[misc] # vLLM is no dependency
    """Of a batch, by row: the answer, and what is written of it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Rows are removed, added and moved, in this order."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, written in batch_update.added:
            answer = (params.extra_args or {}).get(FORCED)
            self._rows.pop(row, None)
            if answer:
                self._rows[row] = (answer, written)
        for source, target, how in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and how.name == "SWAP":
                self._rows[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V], in place."""
        due = [(row, answer[len(done)]) for row, (answer, done) in self._rows.items() if len(done) < len(answer)]
        if not due:
            return logits
        rows_K, tokens_K = torch.tensor(due).to(self._device, non_blocking=True).unbind(1)  # noqa: N806 - their shape
        logits[rows_K] = float("-inf")
        logits[rows_K, tokens_K] = 0.0
        return logits
