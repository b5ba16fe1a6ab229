"""What verifying asks of a device, one folder a kind: `cpu`, `cuda`. A further kind is a further folder with a `device`
module, and one line in `_KINDS`; nothing else here asks which kind it is.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.timing.device import made_of
from kbrl_async.kernels.verify.options import BenchOptions, Tick, compiling_s
from kbrl_async.kernels.verify.session import CandidateFault, Judged, Session, Submission
from protocols.records import Candidate, Problem, Timing

if TYPE_CHECKING:
    from kbrl_async.kernels.problems.workloads import Bound
    from kbrl_async.kernels.verify.checks import Checker
    from kbrl_async.kernels.verify.family import Family
    from kbrl_async.kernels.verify.reference import Reference, ReferenceChild

_KINDS = {
    "cpu": "kbrl_async.kernels.verify.cpu.device:CpuDevice",
    "cuda": "kbrl_async.kernels.verify.cuda.device:CudaDevice",
}


class Measures(Protocol):
    """A stopwatch over one candidate and one twin of its reference."""

    def prepare(self) -> None: ...
    def run(self) -> Timing | None: ...
    def close(self) -> None: ...


class Device:
    """One device, by its name: `"cpu"` or `"cuda:N"`. Making one touches nothing; `open` does. What has a body here is
    right where children share the host's memory and nothing is started ahead.
    """

    shares = False
    """Whether a candidate's process can serve one workload after the other."""
    tools = "tool"
    """The profile of a zygote whose children run compilers that use it."""
    references = 8
    """That a bench keeps where nobody says how many."""

    def __init__(self, name: str) -> None:
        self.name = name

    def zygote(self, modules: tuple[str, ...]) -> Zygote:
        """One whose children can run on it, and have imported these modules, too."""
        raise NotImplementedError

    def fitted(self, options: BenchOptions) -> BenchOptions:
        """The options with what this kind needs at least."""
        return options

    def open(self, memory_share: float) -> None:
        """`memory_share`: of its own memory, what this process may have at most.

        :raises MissingTool: it is not there.
        """

    def enter(self) -> None:
        """The calling thread uses it from now on.

        :raises InfraError: it is out of service.
        """

    def reference(
        self,
        zygote: Zygote,
        problem: Problem,
        options: BenchOptions,
        rng: random.Random,
        kept: OrderedDict[str, Family],
        tick: Tick,
    ) -> Reference:
        """A new reference; of those `kept`, the ones used longest ago may be closed to make room."""
        raise NotImplementedError

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
        """A new reference of one workload of several; `shares`: what those before it have of each module."""
        return self.reference(zygote, bound.problem, options, rng, kept, tick)

    def judged(
        self,
        reference: Reference,
        zygote: Zygote,
        code: Submission,
        options: BenchOptions,
        rng: random.Random,
        is_alone: bool,
    ) -> Judged:
        """What a candidate is judged by, not attached yet. `is_alone`: no process that has served another has a part.

        :raises CandidateFault: it ends itself.
        """
        return reference.open(zygote, code, options.deadline_s + compiling_s(options, code.source))

    def is_repeated(
        self, reference: Reference, code: Submission, options: BenchOptions, is_right: bool, is_alone: bool
    ) -> bool:
        """Whether a process of another history makes the same of the last candidate as the one before it. `is_alone`:
        of no history.
        """
        return False

    def elsewhere(self) -> AbstractContextManager[None]:
        """Candidates are given to the process of another history in here."""
        return nullcontext()

    def contradict(self, is_right: bool) -> None:
        """A process that has served nobody else came to another verdict on the last candidate; or, where `is_right`, a
        second one to other work.
        """

    def room(self, options: BenchOptions) -> float:
        """Bytes of its own memory that all references together may take."""
        return 0.0

    @property
    def verifiers(self) -> int:
        """On it, this one among them: each may find it busy with what the others judge."""
        return 1

    def may_use(self, size: int) -> bool:
        """Whether a verification may plan with so many bytes of its memory beside other verifiers' plans, now."""
        return True

    def rest(self, kept: int) -> bool:
        """After a candidate, with `kept` bytes in references; false: others have to wait for these."""
        return True

    @property
    def has_neighbours(self) -> bool:
        """Whether other verifiers use its memory: what a candidate does not find may be theirs."""
        return False

    @property
    def is_crowded(self) -> bool:
        """Whether they plan with some of it right now."""
        return False

    def give_way(self, tick: Tick, is_last: bool = False) -> None:
        """Memory has run out: what was started ahead goes, and others are waited for, a while; before the last try
        longer, for everything.
        """

    def free(self) -> int | None:
        """Bytes of its own memory that nobody has; None where it has none of its own."""
        return None

    def held(self, pid: int) -> int | None:
        """Bytes of its own memory that a process has; None where nobody tells."""
        return None

    def stopwatch(
        self, checker: Checker, twin: Session, options: BenchOptions, rng: random.Random, tick: Tick
    ) -> Measures:
        """For one measurement."""
        raise NotImplementedError

    def prove(
        self, checker: Checker, candidate: Candidate, options: BenchOptions, rng: random.Random, tick: Tick
    ) -> None:
        """Before it is timed: whether the candidate's own kernels make its outputs; sets the checker's fault."""

    def refuse_short(self, checker: Checker) -> None:
        """After it was timed.

        :raises NoMemory: a library found less than it likes on one of both sides, which others have.
        """

    def prove_last(self, checker: Checker) -> None:
        """The same, where that asks for calls after which it is no use any more."""

    def ended(self, fault: CandidateFault, pid: int, zygote: Zygote) -> None:
        """After a candidate with a fault: is everything still as it should be?

        :raises InfraError: it is not, and nothing more is judged here.
        """

    def settle(self) -> None:
        """Returns when nothing that was started for later candidates is on it any more."""

    def restart(self) -> None:
        """Its children are gone with their zygote, which was replaced."""

    def close(self) -> None:
        """What was started ahead ends."""


def device_of(name: str) -> Device:
    """The device of that name.

    :raises UserError: nobody knows such a kind.
    """
    made: Device = made_of(_KINDS, name)
    return made
