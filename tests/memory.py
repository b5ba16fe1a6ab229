"""Bytes of tensors as PyTorch makes and drops them, storage by storage: on a CPU, where no allocator counts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch annotates neither
    """Inside of it, `peak` is the most bytes that stood at once: of what was watched, and of all that is made."""

    def __init__(self, watched: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: set[int] = set()
        for tensor in watched:
            self._meet(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor)
        return out

    def _meet(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        self._alive.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._part, storage._cdata, storage.nbytes())

    def _part(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size
