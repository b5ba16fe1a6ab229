"""The trusted side of a replay on a CPU: from a candidate's child to one that does its recorded work again.

::

    candidate's child ─▶ recorded on secret inputs: right? ─▶ recorded on others: the same program?
         ─▶ blocks read from outside ─▶ replayer, with compiled functions only: right on the inputs recorded last?

Whatever stands against it is a reason in words; the candidate then is judged in its own process.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from msgspec import structs

from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cpu import program, statics
from kbrl_async.kernels.verify.cpu.program import CpuProgram
from kbrl_async.kernels.verify.input_set import InputSet, place
from kbrl_async.kernels.verify.memory import memory_file, seal, seal_size
from kbrl_async.kernels.verify.options import BenchOptions
from kbrl_async.kernels.verify.replies import Malformed
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome, Session, no_meter

_RUNS = (wire.OP_RUN, wire.OP_TRACE, wire.OP_MUTED, wire.OP_BURST)
_MOST_WRITTEN = 256 << 20
_ALIGNMENT = 64
WRONG = "its first answer is wrong"
_Found = TypeVar("_Found")


class NoReplay(Exception):  # noqa: N818 - a reason, not an error
    """Why there is no replay, in words."""


class Work:
    """A program that can be replayed, with the memory that lasts from call to call: what no step may write to as a
    sealed file that all replays share, the rest as bytes that each replay gets a copy of."""

    def __init__(self, work: CpuProgram, data: bytes, block: Callable[[int, int], torch.Tensor]) -> None:
        self.data, self.steps, self.is_compiled = data, len(work.steps), work.is_compiled
        self._program = work
        self.places: list[tuple[int, int]] = []
        ends = [0, 0]
        for one in work.blocks:
            self.places.append((int(one.is_written), ends[one.is_written]))
            ends[one.is_written] += values.padded(one.size, _ALIGNMENT)
        if ends[1] > _MOST_WRITTEN:
            raise NoReplay("what it keeps and may write to is too large to be put back before each call")
        kept = [torch.zeros(end, dtype=torch.uint8) for end in ends]
        for (file, begin), one in zip(self.places, work.blocks, strict=True):
            kept[file][begin : begin + one.size] = block(one.place, one.size)
        self.written = kept[1]
        self.fixed_fd = memory_file("blocks")
        _write(self.fixed_fd, kept[0])
        seal(self.fixed_fd)

    @property
    def plan(self) -> str:
        return hashlib.sha256(repr(self._program.shape).encode()).hexdigest()

    def calls_behind(self, inputs: Collection[int]) -> set[int]:
        """Places of the calls of built functions that depend on these inputs."""
        return program.calls_behind(self._program, inputs)

    def without_calls(self, places: Collection[int] | None = None) -> Work:
        """The same without a call of a built function, or without those at these places, to be closed by itself."""
        made, all_steps = copy.copy(self), enumerate(self._program.steps)
        is_out = (lambda place: True) if places is None else places.__contains__
        steps = [step for place, step in all_steps if not (isinstance(step, program.Call) and is_out(place))]
        made.data, made.fixed_fd = program.encode(structs.replace(self._program, steps=steps)), os.dup(self.fixed_fd)
        return made

    def close(self) -> None:
        if self.fixed_fd >= 0:
            os.close(self.fixed_fd)
            self.fixed_fd = -1


class CpuReplaySession(Session):
    """A child that does `work` again. Before each run everything that lasts in it is as it was before the first one."""

    entry = "kbrl_async.kernels.verify.cpu.replayer:main"

    def __init__(
        self, zygote: Zygote, work: Work, artifacts: Mapping[str, Path], limits: Limits, deadline_s: float
    ) -> None:
        self._artifacts, self._work, self.steps = artifacts, work, work.steps
        self.own_share = 1.0 if work.is_compiled else None
        self._muted: Work | None = None
        self._written = torch.empty(0, dtype=torch.uint8)
        self._statics: statics.Statics | None = None
        paths = {key: str(path) for key, path in artifacts.items()}
        setup = wire.Setup("", "", 0, paths, program=work.data, blocks=work.places)
        self._open = functools.partial(CpuReplaySession, zygote, limits=limits, deadline_s=deadline_s)
        written = memory_file("written")
        try:
            self._written = _mapped(written, work.written)
            super().__init__(zygote, setup, (work.fixed_fd, written), limits, deadline_s)
        finally:
            os.close(written)
        self.plan = work.plan
        if artifacts:
            self._muted = work.without_calls()

    def without_backward(self, upstream: Collection[int]) -> CpuReplaySession | None:
        """Another one, in which no call of a built function depends on these inputs; None where none does."""
        assert self._muted is not None
        places = self._work.calls_behind(upstream)
        if not places:
            return None
        work = self._muted.without_calls(places)  # it holds the memory that lasts, too, and is not closed by others
        try:
            return self._open(work, self._artifacts)
        finally:
            work.close()

    def muted(self) -> CpuReplaySession:
        """Another one, for `OP_MUTED`, in which no built code was ever loaded: what that does to its own process can't
        make a difference there."""
        assert self._muted is not None
        return self._open(self._muted, {})

    def attach(self, tree: wire.Tree, tensors: list[torch.Tensor], slots: int, copies: bool = False) -> None:
        super().attach(tree, tensors, slots, copies)
        if self._statics is None:
            self._statics = self.guarded(lambda: statics.Statics(self.host_pid, self._artifacts))

    def call(
        self, op: int, slot: int, deadline_s: float, meter: Callable[[], tuple[int, int]] = no_meter
    ) -> ForwardOutcome:
        if op in _RUNS:
            self.put_back()
        return super().call(op, slot, deadline_s, meter)

    def put_back(self) -> None:
        assert self._statics is not None
        self.guarded(self._statics.restore)
        if not torch.equal(self._written, self._work.written):
            self._written.copy_(self._work.written)

    def guarded(self, look: Callable[[], _Found]) -> _Found:
        """What can't be found where it was loaded is the work of what was loaded."""
        try:
            return look()
        except OSError as error:
            if self._child.has_ended():
                self._ended()
            raise self.forged(f"{error}") from error

    def close(self) -> None:
        super().close()
        if self._muted is not None:
            self._muted.close()
        self._written = torch.empty(0, dtype=torch.uint8)


def _program(session: Session, said: wire.Taped, artifacts: Mapping[str, Path]) -> tuple[CpuProgram, bytes]:
    if said.refused or not said.program:
        raise NoReplay(said.refused or "nothing was recorded")
    try:
        return program.read(said.program, artifacts), said.program
    except Malformed as error:
        raise session.forged(f"what it recorded is no program: {error}") from error


def _write(fd: int, content: torch.Tensor) -> None:
    os.ftruncate(fd, content.numel())
    data = memoryview(content.numpy().data)
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def _mapped(fd: int, content: torch.Tensor) -> torch.Tensor:
    """The file's memory, filled with `content`; its size can't change any more."""
    _write(fd, content)
    seal_size(fd)
    if not content.numel():
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(fd, content.numel()), dtype=torch.uint8)


class Judging(Protocol):
    """How outputs of a candidate are judged; see `checks.Checker`."""

    def call_deadline(self) -> float: ...
    def is_right(self, session: Session, outcome: ForwardOutcome, input_set: InputSet) -> bool: ...


class Owner(Protocol):
    """A reference, as far as replays need it."""

    copies: bool
    session: Session

    def claim(self) -> None: ...
    def rehearsal(self, number: int) -> InputSet: ...
    def attach(self, session: Session) -> None: ...
    def check(self, session: Session) -> bool: ...


class CpuReplays:
    """Of one reference, their owner, and its candidates. It does not hold its owner, which holds it."""

    def __init__(self, options: BenchOptions) -> None:
        self._options = options
        self._own: Work | str = ""
        self._twin: Session | None = None

    def forget_twin(self) -> None:
        """With new secrets another number of slots may fit into memory, and a twin has answered all input sets."""
        if self._twin is not None:
            self._twin.close()
            self._twin = None

    def close(self) -> None:
        self.forget_twin()
        if isinstance(self._own, Work):
            self._own.close()
        self._own = ""

    def of(
        self, owner: Owner, zygote: Zygote, session: Session, artifacts: Mapping[str, Path], judge: Judging
    ) -> Session:
        """:raises Refused: there can't be one."""
        if owner.copies:
            raise NoReplay("this host lets nobody read a child's memory")
        if reason := statics.refusal(artifacts):
            raise NoReplay(reason)
        known = owner.rehearsal(0)
        place(session, 0, known)
        first = session.record(0, judge.call_deadline())
        if not judge.is_right(session, session.call(wire.OP_EMPTY, 0, judge.call_deadline()), known):
            raise NoReplay(WRONG)
        self._own_work(owner, zygote)
        work, last = self._recorded(owner, session, artifacts, first, judge.call_deadline)
        try:
            return self._right(owner, zygote, work, artifacts, (last, known), judge)
        finally:
            work.close()

    def _right(
        self,
        owner: Owner,
        zygote: Zygote,
        work: Work,
        artifacts: Mapping[str, Path],
        known: tuple[InputSet, ...],
        judge: Judging,
    ) -> Session:
        """A replay, right on inputs that were recorded: else something that forward does is not in its program. Not on
        the last ones alone: what numpy made of those lies in a block that seems to last.
        """
        limit_s = judge.call_deadline()
        session = CpuReplaySession(zygote, work, artifacts, self._options.limits, self._options.deadline_s)
        try:
            owner.attach(session)
            if all(self._answers(session, one, judge, limit_s) for one in known):
                return session
            reason = "its recorded work gives other results when it is done again"
        except CandidateFault as fault:
            reason = f"its recorded work fails when it is done again ({fault.kind}: {fault.text[:120]})"
        except BaseException:
            session.close()
            raise
        session.close()
        raise NoReplay(reason)

    def _answers(self, session: Session, known: InputSet, judge: Judging, limit_s: float) -> bool:
        place(session, 0, known)
        return judge.is_right(session, session.call(wire.OP_RUN, 0, limit_s), known)

    def twin(self, owner: Owner, zygote: Zygote) -> Session:
        """The reference by the same door: a replay of it that has answered all input sets, as a candidate's has."""
        twin, self._twin = self._twin, None
        return twin or self._checked(owner, zygote, self._own_work(owner, zygote))[0]

    def keep(self, twin: Session) -> None:
        """For the next candidate: only a program of ours ran in it, and it does the same every time."""
        self._twin = twin

    def _own_work(self, owner: Owner, zygote: Zygote) -> Work:
        if not self._own:
            self._own = self._made(owner, zygote)
        if isinstance(self._own, str):
            raise NoReplay(f"the reference can't be replayed: {self._own}")
        return self._own

    def _made(self, owner: Owner, zygote: Zygote) -> Work | str:
        session = owner.session
        try:
            rehearsal = owner.rehearsal(0)
            owner.claim()
            place(session, 0, rehearsal)
            limit_s = self._options.reference_deadline_s
            work, _ = self._recorded(owner, session, {}, session.record(0, limit_s), lambda: limit_s)
            replay, is_right = self._checked(owner, zygote, work)
        except NoReplay as reason:
            return str(reason)
        except CandidateFault as fault:
            return fault.text
        if is_right:
            self.keep(replay)  # the first candidate's, which is timed next
            return work
        replay.close()
        return "its recorded work gives other results when it is done again"

    def _checked(self, owner: Owner, zygote: Zygote, work: Work) -> tuple[Session, bool]:
        session = CpuReplaySession(zygote, work, {}, self._options.limits, self._options.reference_deadline_s)
        try:
            owner.attach(session)
            return session, owner.check(session)
        except BaseException:
            session.close()
            raise

    def _recorded(
        self,
        owner: Owner,
        session: Session,
        artifacts: Mapping[str, Path],
        first: wire.Taped,
        deadline_s: Callable[[], float],
    ) -> tuple[Work, InputSet]:
        """What forward does again and again, and the inputs that it was last seen doing it for."""
        before = _program(session, first, artifacts)[0]
        for number in (1, 2):
            rehearsal = owner.rehearsal(number)
            place(session, 0, rehearsal)
            work, data = _program(session, session.record(0, deadline_s()), artifacts)
            if work.shape == before.shape:
                return Work(work, data, session.block), rehearsal
            before = work  # what the first run prepared for all others, the second does not do again
        raise NoReplay("forward does not do the same steps for other inputs")
