"""The references that a bench keeps, one per problem source."""

from __future__ import annotations

import random
from collections import OrderedDict

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.verify.device import Device, device_of
from kbrl_async.kernels.verify.memory import give_back
from kbrl_async.kernels.verify.options import BenchOptions, Tick, no_tick
from kbrl_async.kernels.verify.reference import Reference
from protocols.records import Problem


class References:
    """A small LRU of references, one per problem source."""

    def __init__(self, zygote: Zygote, options: BenchOptions, rng: random.Random, device: Device | None = None) -> None:
        self._zygote, self._options, self._rng = zygote, options, rng
        self._device = device or device_of(options.device)
        self._kept: OrderedDict[str, Reference] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, problem: Problem, tick: Tick = no_tick) -> Reference:
        """`tick` is called between the steps of making one, which takes seconds."""
        reference = self._kept.pop(problem.source, None)
        if reference is not None and reference.uses >= self._options.reuse:
            reference.tick = tick
            try:
                reference.refresh()
            except (ProblemError, InfraError):
                reference.close()
                raise
            except OSError as error:  # its child was killed, and the way to it is closed
                reference.close()
                cause = f"the reference of {problem.problem_id} is gone ({error})"
                raise InfraError(cause, "It is made anew for the next candidate") from error
        if reference is None:
            reference = self._device.reference(self._zygote, problem, self._options, self._rng, self._kept, tick)
        reference.uses += 1
        self._kept[problem.source] = reference
        while self._are_too_many():
            self._kept.popitem(last=False)[1].retire()
            give_back()
        return reference

    def _are_too_many(self) -> bool:
        """By number, or by what they take: problems differ by a factor of a thousand."""
        if len(self._kept) <= 1:
            return False
        if len(self._kept) > self._options.references:
            return True
        if sum(reference.host_bytes for reference in self._kept.values()) > self._options.reference_bytes:
            return True
        on_device = sum(reference.device_bytes for reference in self._kept.values())
        return on_device > 0 and on_device > self._device.room(self._options)

    def settle(self) -> None:
        """Returns when no child that waits for its candidate is still making its context."""
        self._device.settle()

    def drop(self, reference: Reference) -> None:
        """Its child is in doubt: forget it."""
        self._kept.pop(reference.problem.source, None)
        reference.close()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()
        self._device.close()
