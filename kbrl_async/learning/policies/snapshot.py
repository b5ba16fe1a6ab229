"""A copy of a policy's weights on the host, made while the learner waits, so that all that is slow can be done beside
the next update: writing, hashing, sending.

::

    named_weights(model), or those of all ranks: one after the other ─▶ HostCopy.of ─▶ name ─▶ tensor on the host

Invariant: a copy is valid until the next one is made with the same `HostCopy`, which reuses its memory: so much memory
as one version takes, pinned where the weights are on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future

import torch

Named = Iterable[tuple[str, torch.Tensor]]


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict without tied duplicates: safetensors stores no aliases."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


class HostCopy:
    """The memory of one copy.

    memory = HostCopy(torch.bfloat16)
    tensors = memory.of(named_weights(model))
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype` that floating-point weights are rounded to; None: as they are."""
        self._dtype = dtype
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def of(self, named: Named) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in named:
            rounded = tensor.to(self._dtype) if self._dtype and tensor.is_floating_point() else tensor
            made[name] = self._room(name, rounded).copy_(rounded, non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._held = made
        return made

    def another(self) -> HostCopy:
        """The memory of one more copy as large as this. On a GPU's host a gigabyte takes a second: pages are pinned."""
        made = HostCopy(self._dtype)
        made._held = {
            name: torch.empty_like(tensor, pin_memory=tensor.is_pinned()) for name, tensor in self._held.items()
        }
        return made

    def _room(self, name: str, like: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == like.shape and held.dtype == like.dtype:
            return held
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class Snapshots:
    """Copies of the versions that somebody still reads, each in the memory of one that nobody does any more.

    memory = Snapshots(torch.bfloat16)
    tensors = memory.of(17, named_weights(model), keep={15})
    """

    def __init__(self, dtype: torch.dtype | None = None, *, ahead: bool = False) -> None:
        """See `HostCopy`. `ahead`: two copies will be held, and the second one's memory is taken beside what follows
        the first one."""
        self._dtype, self._ahead = dtype, ahead
        self._copies: dict[int, HostCopy] = {}
        self._second: Future[HostCopy] | None = None

    def of(self, version: int, named: Named, keep: Collection[int] = ()) -> dict[str, torch.Tensor]:
        """Valid until a version is copied that does not `keep` this one."""
        spare = [copy for held, copy in self._copies.items() if held not in keep]
        copy = spare[0] if spare else self._fresh()
        self._copies = {held: one for held, one in self._copies.items() if held in keep} | {version: copy}
        made = copy.of(named)
        if self._ahead:
            self._ahead, self._second = False, in_thread(copy.another)
        return made

    def _fresh(self) -> HostCopy:
        if self._second is None:
            return HostCopy(self._dtype)
        second, self._second = self._second, None
        return second.result()


def in_thread(make: Callable[[], HostCopy]) -> Future[HostCopy]:
    """What `make` gives, as a daemon thread finds it."""
    found: Future[HostCopy] = Future()

    def work() -> None:
        try:
            found.set_result(make())
        except Exception as error:  # supervisor: whoever asks for it gets it
            found.set_exception(error)

    threading.Thread(target=work, name="second-copy", daemon=True).start()
    return found


def as_they_are(named: Named) -> dict[str, torch.Tensor]:
    """The same for weights that nobody changes until they are written: copied from a GPU only."""
    return {name: tensor.cpu().contiguous() for name, tensor in named}
