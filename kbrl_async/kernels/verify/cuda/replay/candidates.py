"""From a candidate to a session that replays it: recorded, read, loaded, tried once; or why not.

::

    inputs placed ─▶ recorder ─▶ bytes ─ validation ─▶ Recording ─▶ player ─▶ `ReplaySession`
                        └──────────── not recorded, not readable, not loadable: `Unreplayable`
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.stages import span, tally
from kbrl_async.kernels.verify import compare, validation, values, wire
from kbrl_async.kernels.verify.cuda.record.session import MAX_SERVED, Recorders, spares_for
from kbrl_async.kernels.verify.cuda.reference import RECORDED_SHARE, CudaReference
from kbrl_async.kernels.verify.cuda.replay.host import ReplayHost, ShortOfMemory, Unreplayable
from kbrl_async.kernels.verify.cuda.replay.images import Unloadable, images
from kbrl_async.kernels.verify.cuda.replay.session import ReplaySession
from kbrl_async.kernels.verify.cuda.replay.stretches import place_inputs
from kbrl_async.kernels.verify.cuda.starting import NoRoom, NotStarted
from kbrl_async.kernels.verify.recording import NO_ROOM, Recording, decode
from kbrl_async.kernels.verify.replies import Malformed
from kbrl_async.kernels.verify.session import CandidateFault, Submission

_LEAST_BYTES = 1 << 30
_BESIDE = 512 << 20
_LITTLE = 2 << 20
"""Of an arena between two candidates, where others want the memory."""
_SECONDS = 128
"""Candidates that the second recorder serves at most: only those with something against them come to it, and each that
is drawn to be recorded alone (`BenchOptions.alone_share`) ends it sooner."""
_READY = 1
"""Recorders that wait. Whoever makes or ends a context holds the driver's locks, for all processes of a GPU, for some
tenths of a second."""
_TOO_LARGE = "its inputs take too much memory to be held twice more"
_LEAST_TIMES, _TIMES = 2, 3
"""Outputs of all slots, intermediate results and what a recorder compares, in units of inputs and outputs: without
which nothing can be recorded, and enough for most."""


class _Written(msgspec.Struct, frozen=True):
    """What a recorder wrote of a candidate, and where its inputs were."""

    content: bytes
    placed: list[list[wire.TensorMeta]]
    start: int
    recording: Recording
    image: list[torch.Tensor] = []
    """What lasts of it from call to call."""
    is_brief: bool = False


def _is_alike(content: bytes, arena: torch.Tensor, other: _Written) -> bool:
    """Whether this, with what lasts in that arena, says the same as the other."""
    if content != other.content:
        tally("recorded otherwise")
        return False
    stretches = zip(other.recording.image, other.image, strict=True)
    if not all(compare.same_values(arena[begin:end], kept) for (begin, end), kept in stretches):
        tally("recorded with other bytes that last")
        return False
    return True


def outline(content: bytes) -> list[list[str]] | None:
    """What the forwards of a recording consist of; None where it can't be read."""
    try:
        forwards = decode(content).forwards
    except (ValueError, TypeError):
        return None
    return [[getattr(node, "name", type(node).__name__) for node in forward.nodes] for forward in forwards]


class Replays:
    """Recorders and players of one bench on its GPU."""

    def __init__(
        self,
        zygote: Zygote,
        limits: Limits,
        device: str,
        memory_share: float,
        may_grow: Callable[[int], bool] = lambda size: True,
    ) -> None:
        """`may_grow`: whether other verifiers leave so many bytes more, asked before they are taken."""
        self._zygote, self._device, self._may_grow = zygote, device, may_grow
        self._memory_share = memory_share
        self._host = ReplayHost(zygote, limits, device)
        self._spares = spares_for(zygote, limits, device, _READY)
        self._recorders: Recorders | None = None
        self._seconds: Recorders | None = None
        self._generation = -1
        self._last: _Written | None = None
        self._first: _Written | None = None
        """Before it was recorded alone."""
        self._most_served = MAX_SERVED
        self._is_brief = True
        """Not where the first process is in doubt: see `wire.RecordForward.is_brief`."""
        self._was_brief = False
        """The last candidate's order, which may have left out what tells that a replay is not what forward does."""

    def open(
        self,
        reference: CudaReference,
        code: Submission,
        deadline_s: float,
        rng: random.Random,
        is_alone: bool,
        may_keep: bool = False,
        is_brief: bool = False,
    ) -> ReplaySession:
        """`is_alone`: recorded and replayed by processes that have served nobody else. `may_keep`: see `ReplaySession`.
        `is_brief`: what takes long is recorded in brief (`wire.RecordForward`), but by who is asked in a doubt.

        :raises Unreplayable: it has to be judged another way.
        """
        self._first, self._last = self._last if is_alone else None, None
        self._was_brief = is_brief and self._is_brief and not is_alone
        if reference.offloaded.inputs:
            raise Unreplayable(_TOO_LARGE)
        if refused := reference.capture_refused():
            raise Unreplayable(f"its reference can't be timed as a graph ({refused})")
        try:
            built = images(map(Path, code.artifacts.values()))
        except Unloadable as refusal:
            raise Unreplayable(str(refusal)) from refusal
        slots = reference.plan.slots
        placed, start = place_inputs(reference.examples, slots, rng)
        once = reference.slot_bytes * slots
        least = start + reference.weights_bytes + reference.inside_bytes + _LEAST_TIMES * once
        digests = frozenset(image.digest for image in built)

        def recorded(recorders: Recorders) -> _Written:
            if is_alone:
                recorders.forget()
            try:
                with span("recorded"):
                    content = reference.record(recorders, code, placed, start, deadline_s, self._was_brief)
            except (CudaError, NoRoom) as error:
                self.give_back()
                raise ShortOfMemory(f"there is no memory to record it in ({error})") from error
            bounds = validation.Bounds(recorders.arena.size, digests, slots)
            try:
                recording = validation.read(content, bounds)
            except Malformed as error:
                raise Unreplayable(f"its recording says what can't be ({error})") from error
            return _Written(content, placed, start, recording, is_brief=self._was_brief)

        recorders = self._recorders_for(least, (_TIMES - _LEAST_TIMES) * once, reference.needed)
        if is_alone:
            self._host.renew()
        self._last = recorded(recorders)
        if self._last.recording.refused.startswith(NO_ROOM) and self._is_larger(recorders, least):
            self._last = recorded(recorders)
        recording = self._last.recording
        if recording.refused:
            raise Unreplayable(recording.refused)
        try:
            with span("loaded"):
                given = self._host, recording, built, placed, recorders.arena, rng
                session = ReplaySession(*given, self.is_shared, may_keep)
        except CudaError as error:
            raise ShortOfMemory(f"there is no memory to replay it in ({error})") from error
        except NoRoom as error:
            self.give_back()  # who watches it needs memory for a process, too
            raise ShortOfMemory(f"there is no memory to replay it in ({error})") from error
        self._last = msgspec.structs.replace(self._last, image=session.image)
        try:
            with span("tried"):
                self._try(session, reference, deadline_s, rng)
        except CandidateFault as fault:
            session.fault = session.fault or fault
        except BaseException:
            session.close()
            raise
        self.refill()
        return session

    def is_repeated(
        self, reference: CudaReference, code: Submission, deadline_s: float, is_right: bool, is_alone: bool
    ) -> bool:
        """Whether a second process, which has served other candidates than the first, or nobody else where `is_alone`,
        writes down of the last one what the first wrote, and keeps the same in memory that lasts. Then what was found
        of its replay holds: the same work on the same inputs has the same results. Of what is right only the kind of
        its steps is compared: a tuned kernel is launched in several ways. The process that served nobody else is the
        second one for those that follow.
        """
        last, first = self._last, self._recorders
        if last is None or first is None or (asked := self._second(first.arena.size)) is None:
            return False
        if is_alone:
            asked.forget()
        try:
            with span("recorded alone" if is_alone else "recorded by a second"):
                content = reference.record(asked, code, last.placed, last.start, deadline_s)
        except (CudaError, NoRoom):
            self.give_back()
            return False
        self._spares.refill()
        if is_right:
            return outline(content) == outline(last.content)
        return _is_alike(content, asked.arena.raw, last)

    @contextlib.contextmanager
    def by_the_second(self) -> Iterator[None]:
        """Candidates are recorded by the second process in here."""
        first = self._last
        self._recorders, self._seconds, self._is_brief = self._seconds, self._recorders, False
        try:
            yield
        finally:
            self._recorders, self._seconds, self._last = self._seconds, self._recorders, first
            self._is_brief = True

    def contradict(self, is_right: bool) -> None:
        """A process that served nobody else leads to another verdict, or may lead to other work. Where it has written
        the same as the first, that is the candidate's own doing; else from now on each process serves one candidate.
        What was recorded in brief may differ by that: then only these processes are replaced.
        """
        seen = outline if is_right else bytes
        if self._first is not None and self._last is not None and seen(self._first.content) == seen(self._last.content):
            return
        if self._first is None or not self._first.is_brief:
            self._most_served = 1
        self.give_back()

    def _second(self, size: int) -> Recorders | None:
        """None where there is no memory for one."""
        known = self._seconds
        try:
            if known is None:
                self._seconds = known = Recorders(self._spares, self._device, size, _SECONDS)
            elif known.arena.size != size:
                known.resize(size)
        except CudaError:
            self._give_back_second()
            return None
        return known

    def _give_back_second(self) -> None:
        if self._seconds is not None:
            self._seconds.close()
            self._seconds = None

    def _try(self, session: ReplaySession, reference: CudaReference, deadline_s: float, rng: random.Random) -> None:
        if session.has_operators:
            reference.pool.mix([session.slots[0]], rng)
        try:
            session.try_once(deadline_s)
        except NotStarted:
            raise
        except InfraError as error:
            raise Unreplayable("the process that replays it ended") from error

    def _is_larger(self, recorders: Recorders, least: int) -> bool:
        """Whether these got as much memory as any may have, which they had not before."""
        before = recorders.arena.size
        try:
            return self._recorders_for(least, self._most) is recorders and recorders.arena.size > before
        except ShortOfMemory:
            return False

    @property
    def _share(self) -> int:
        """Bytes of the GPU that this verifier may plan with."""
        return int(self._memory_share * torch.cuda.get_device_properties(torch.device(self._device)).total_memory)

    @property
    def _most(self) -> int:
        """Bytes of an arena, at most."""
        return int(RECORDED_SHARE * self._share) // _LEAST_BYTES * _LEAST_BYTES

    def _recorders_for(self, size: int, more: int, needed: int = 0) -> Recorders:
        """`more`: bytes that are good to have, where what was predicted (`needed`) leaves them of a verifier's share.

        :raises Unreplayable: so much memory is not to be had.
        """
        more = max(0, min(more, self._share - needed))
        least, wanted = (values.padded(one + _BESIDE, _LEAST_BYTES) for one in (size, size + more))
        if least > max(self._most, _LEAST_BYTES):
            raise Unreplayable(_TOO_LARGE)
        wanted = max(least, min(wanted, self._most))
        known = self._recorders if self._generation == self._zygote.generation else None
        has = 0 if known is None else known.arena.size
        if wanted > max(has, least) and not self._may_grow(wanted - has):
            wanted = least
        if known is not None and wanted <= has:
            return known
        try:
            if known is None:
                self.give_back()
                known = Recorders(self._spares, self._device, wanted, self._most_served)
            else:
                known.resize(wanted)
        except CudaError as error:
            self.give_back()
            raise ShortOfMemory(f"there is no memory to record it in ({error})") from error
        self._generation, self._recorders = self._zygote.generation, known
        return known

    @property
    def is_shared(self) -> bool:
        """Whether the last candidate was recorded by a process that had served others, or in brief: then what counts
        against it is found out once more.
        """
        return self._recorders is not None and (self._was_brief or not self._recorders.is_fresh)

    def refill(self) -> None:
        """Start whoever waits for the next candidates; returns at once."""
        self._spares.refill()
        self._host.refill()

    def settle(self) -> None:
        """Returns when nothing that was started for later candidates is still starting."""
        self._host.settle()
        self._spares.settle()

    def give_back(self) -> None:
        """What memory can be had again; who needs it next makes it anew."""
        self._give_back_second()
        if self._recorders is not None:
            self._recorders.close()
            self._recorders = None

    def shrink(self) -> None:
        """The same, but for processes, which wait for the next candidate with next to no memory."""
        self._give_back_second()
        try:
            if self._recorders is not None:
                self._recorders.shrink(_LITTLE)
            self._host.shrink(_LITTLE)
        except CudaError:
            self.close()

    @property
    def device_bytes(self) -> int:
        recorders = [one for one in (self._recorders, self._seconds) if one is not None]
        return self._host.device_bytes + sum(one.arena.size for one in recorders)

    def close(self) -> None:
        """It may be used again."""
        self._host.close()
        self.give_back()
        self._spares.close()
