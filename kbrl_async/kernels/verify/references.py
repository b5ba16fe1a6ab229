"""The references that a bench keeps: of each problem one for each of its workloads."""

from __future__ import annotations

import random
from collections import OrderedDict

import msgspec

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.problems.cases import cases
from kbrl_async.kernels.problems.workloads import NO_GROUP, Bound
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.stages import span
from kbrl_async.kernels.verify.device import Device, device_of
from kbrl_async.kernels.verify.family import WHOLE, Family, WorkloadCase
from kbrl_async.kernels.verify.hoarding import Crowded
from kbrl_async.kernels.verify.memory import give_back
from kbrl_async.kernels.verify.options import BenchOptions, Tick, no_tick
from kbrl_async.kernels.verify.reference import Reference, ReferenceChild
from protocols.records import Problem

_LIGHT_POOL = 2


class References:
    """A small LRU of families, one per problem source."""

    def __init__(self, zygote: Zygote, options: BenchOptions, rng: random.Random, device: Device | None = None) -> None:
        self._zygote, self._rng, self._device = zygote, rng, device or device_of(options.device)
        most = options.references or self._device.references
        self._options = msgspec.structs.replace(options, references=most)
        self.kept: OrderedDict[str, Family] = OrderedDict()

    def __len__(self) -> int:
        return len(self.kept)

    def get(self, problem: Problem, tick: Tick = no_tick) -> Family:
        """`tick` is called between the steps of making one, which takes seconds."""
        family = self.kept.pop(problem.source, None)
        while family is not None and not self._device.may_use(family.needed + self._device_bytes):
            gone, family = (self.kept.popitem(last=False)[1], family) if self.kept else (family, None)
            gone.retire()
        if family is not None and family.uses >= self._options.reuse:
            family = self._renewed(family, problem, tick)
        if family is None:
            family = self._made(problem, tick)
        family.uses += 1
        self.kept[problem.source] = family
        with span("a reference's end"):
            while self._are_too_many():
                self.kept.popitem(last=False)[1].retire()
                give_back()
        return family

    def _renewed(self, family: Family, problem: Problem, tick: Tick) -> Family | None:
        """With new secrets; None where it has to be made anew: secret shapes are among them, or others need the
        memory."""
        if len(family.cases) > 1:
            family.close()
            return None
        reference = family.cases[0].reference
        reference.tick = tick
        try:
            reference.refresh()
        except Crowded:  # others have taken memory meanwhile; whoever makes it anew waits for them
            reference.retire()
            return None
        except OSError as error:  # its child was killed, and the way to it is closed
            reference.close()
            cause = f"the reference of {problem.problem_id} is gone ({error})"
            raise InfraError(cause, "It is made anew for the next candidate") from error
        except BaseException:  # a tick's, too: nobody else knows it any more
            reference.close()
            raise
        family.uses = 0
        family.timings.clear()
        return family

    def _made(self, problem: Problem, tick: Tick) -> Family:
        several = cases(problem, self._rng)
        if not several:
            made = self._device.reference(self._zygote, problem, self._options, self._rng, self.kept, tick)
            return Family(problem.source, [WorkloadCase(WHOLE, made)])
        family, shares = Family(problem.source, []), dict[tuple[str, ...], ReferenceChild]()
        try:
            for bound in several:
                if not self._add(family, bound, shares, tick) and bound.workload.group > 0:
                    break
        except BaseException:
            family.close()
            raise
        return family

    def _add(self, family: Family, bound: Bound, shares: dict[tuple[str, ...], ReferenceChild], tick: Tick) -> bool:
        """Whether the workload is there: a tail that the reference does not take is none, nor a group too many."""
        options, workload = self._options, bound.workload
        if family.cases:
            options = msgspec.structs.replace(options, is_light=True, pool=_LIGHT_POOL)
        try:
            made = self._device.sibling(bound, shares, self._zygote, options, self._rng, self.kept, tick)
        except ProblemError as error:
            if workload.is_tail or NO_GROUP in str(error):
                return False
            raise ProblemError(f"on workload {workload.name}: {error.cause}", error.cure) from error
        family.cases.append(WorkloadCase(workload, made))
        return True

    def _are_too_many(self) -> bool:
        """By number, or by what they take: problems differ by a factor of a thousand."""
        if len(self.kept) <= 1:
            return False
        if len(self.kept) > self._options.references:
            return True
        if sum(family.host_bytes for family in self.kept.values()) > self._options.reference_bytes:
            return True
        on_device = self._device_bytes
        return on_device > 0 and on_device > self._device.room(self._options)

    @property
    def _device_bytes(self) -> int:
        return sum(family.device_bytes for family in self.kept.values())

    def rest(self) -> None:
        """After a candidate: what others wait for is given back."""
        if not self._device.rest(self._device_bytes):
            self.forget()

    def forget(self) -> None:
        """Keeps none; processes that may serve others stay."""
        while self.kept:
            self.kept.popitem()[1].retire()
        self._device.rest(0)

    def give_way(self, tick: Tick, is_last: bool = False) -> None:
        """Nothing is kept any more, and others have had time to give memory back, before the last try all of it."""
        self._close_kept()
        self._device.give_way(tick, is_last)

    def settle(self) -> None:
        """Returns when no child that waits for its candidate is still making its context."""
        self._device.settle()

    def drop(self, reference: Reference) -> None:
        """Its child is in doubt: forget it, and those of the same problem."""
        family = next((one for one in self.kept.values() if reference in one.references), None)
        if family is None:
            reference.close()
            return
        del self.kept[family.source]
        family.close()

    def restart(self) -> None:
        """Their children are gone with their zygote."""
        self._close_kept()
        self._device.restart()

    def close(self) -> None:
        self._close_kept()
        self._device.close()

    def _close_kept(self) -> None:
        while self.kept:
            self.kept.popitem()[1].close()
