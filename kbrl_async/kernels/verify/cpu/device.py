"""A processor, as verifying needs it."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING

from kbrl_async.kernels.backends import preloads
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.verify.cpu.own_kernels import OwnKernels
from kbrl_async.kernels.verify.cpu.stopwatch import Stopwatch
from kbrl_async.kernels.verify.device import Device
from kbrl_async.kernels.verify.options import BenchOptions, Tick
from kbrl_async.kernels.verify.reference import Reference, ReferenceChild
from kbrl_async.kernels.verify.session import CandidateFault, Session
from protocols.records import Fault, Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.problems.workloads import Bound
    from kbrl_async.kernels.verify.checks import Checker
    from kbrl_async.kernels.verify.family import Family

PRELOAD = ("torch", "numpy.random", "kbrl_async.kernels.verify.cpu.runner", "kbrl_async.kernels.verify.cpu.replayer")
_KILLED = frozenset({Fault.TIMEOUT, Fault.ILLEGAL_ACCESS, Fault.OUT_OF_MEMORY})


class CpuDevice(Device):
    """See `verify.device`."""

    shares = True

    def zygote(self, modules: tuple[str, ...]) -> Zygote:
        return Zygote((*PRELOAD, *preloads("cpu"), *modules))

    def reference(
        self,
        zygote: Zygote,
        problem: Problem,
        options: BenchOptions,
        rng: random.Random,
        kept: OrderedDict[str, Family],
        tick: Tick,
    ) -> Reference:
        return Reference(zygote, problem, options, rng, tick)

    def sibling(
        self,
        bound: Bound,
        shares: dict[tuple[str, ...], ReferenceChild],
        zygote: Zygote,
        options: BenchOptions,
        rng: random.Random,
        kept: OrderedDict[str, Family],
        tick: Tick,
    ) -> Reference:
        share = shares.setdefault(bound.workload.arguments, ReferenceChild(bound.module))
        return Reference(zygote, bound.problem, options, rng, tick, share=share, inputs=bound.inputs)

    def stopwatch(
        self, checker: Checker, twin: Session, options: BenchOptions, rng: random.Random, tick: Tick
    ) -> Stopwatch:
        return Stopwatch(checker, twin, options, rng, tick)

    def prove_last(self, checker: Checker) -> None:
        OwnKernels(checker).prove()

    def ended(self, fault: CandidateFault, pid: int, zygote: Zygote) -> None:
        if fault.kind in _KILLED:
            zygote.check()
