"""Two that take turns on a GPU: who is awake sees no inputs of a timed call, whatever it does when it is moved."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.timing import Interval, Measured, Pair, Recipe, measure
from kbrl_async.kernels.verify import bench_options, values, wire
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cuda import claims, runner
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.claims import Claims
from kbrl_async.kernels.verify.cuda.device_places import DevicePlaces, Looks
from kbrl_async.kernels.verify.cuda.session import CudaSession, TimedCall
from kbrl_async.kernels.verify.cuda.stopwatch import CudaStopwatch, _unseen
from kbrl_async.kernels.verify.hoarding import NoMemory
from kbrl_async.kernels.verify.input_set import place
from kbrl_async.kernels.verify.known import Offloaded
from kbrl_async.kernels.verify.session import CandidateFault, Submission
from protocols.records import DISTURBED, Candidate
from tests.unit.kernels.verify.pretended_gpu import SOURCE, far, idle, pretend_memory

SIZE = 4096
SEEN = Looks(lambda: True, lambda: True)


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_memory(monkeypatch)


class Moving(CudaSession):
    """One that stands still, and no process."""

    def __init__(self, is_far: bool = False) -> None:
        self.shared: Any = DeviceArena.new(SIZE, torch.device("cpu"), is_far)
        self.noted, self.given = list[str](), list[int]()
        self._where, self._frozen, self.is_far = torch.device("cpu"), True, is_far
        self._child = Mock(
            **{"thaw.side_effect": lambda: self.note("awake"), "freeze.side_effect": lambda: self.note("still")}
        )

    def note(self, event: str) -> bool:
        self.noted.append(event + (", with its bytes" if any(map(self._holds, self.given)) else ""))
        return True

    @staticmethod
    def _holds(fd: int) -> bool:
        return any(os.pread(fd, SIZE, 0))

    @property
    def stands_still(self) -> bool:
        return self._frozen

    def _send(self, order: bytes, *fds: int) -> None:
        assert wire.decode_order(order) == wire.Move()
        self.given += map(os.dup, fds)

    def _expect(self, kind: Any, deadline_s: float) -> Any:
        self.note("answered")
        return wire.Ready()


def test_a_candidate_that_is_moved_stands_still_before_there_is_anything() -> None:
    session = Moving()
    session.shared.raw.fill_(5)
    session.move(to_host=False)
    assert session.noted == [], "it lies there"
    session.move(to_host=True)
    assert (session.noted, session.given) == (["awake", "answered", "still"], []), "no memory of the host's"
    session.noted.clear()
    session.move(to_host=False, settle=lambda: session.noted.append("idle"))
    assert session.noted == ["awake", "answered", "still", "idle"]
    assert session.stands_still
    assert [os.pread(fd, SIZE, 0) for fd in session.given] == [bytes([5]) * SIZE]
    assert bool((session.shared.raw == 5).all())


def test_the_contents_wait_until_the_gpu_is_idle() -> None:
    session, seen = Moving(), list[bool]()
    session.shared.raw.fill_(5)
    session.move(to_host=True)
    session.move(to_host=False, settle=lambda: seen.extend(any(os.pread(fd, SIZE, 0)) for fd in session.given))
    assert seen == [False]


@pytest.mark.parametrize(("gives_back", "others", "is_fault"), [(0, 0, True), (0, 1, False), (SIZE, 0, False)])
def test_who_gives_no_memory_back_is_at_fault_where_nobody_else_takes_any(
    monkeypatch: pytest.MonkeyPatch, gives_back: int, others: int, is_fault: bool
) -> None:
    free = iter(range(0, 1000 * max(1, gives_back), max(1, gives_back)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (next(free), 0))
    reference, candidate = Moving(is_far=True), Moving()
    both = DevicePlaces(reference, candidate, lambda: bool(others), SEEN)
    both.bring(reference)
    both.bring(candidate)
    with pytest.raises(CandidateFault, match="told to give back") if is_fault else contextlib.nullcontext():
        both.bring(reference)


def test_one_of_both_is_on_the_gpu() -> None:
    reference, candidate = Moving(is_far=True), Moving()
    both = DevicePlaces(reference, candidate, lambda: True, SEEN)
    for side, other in ((reference, candidate), (candidate, reference), (candidate, reference)):
        both.bring(side)
        assert (side.shared.is_on_host, other.shared.is_on_host) == (False, True)
    both.park()
    assert (reference.shared.is_on_host, candidate.shared.is_on_host) == (True, True)


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("watches", [True, False])
def test_who_is_at_work_after_a_move_is_known(is_idle: bool, is_alone: bool, watches: bool) -> None:
    """In the window alone: before it, others may work."""
    reference, candidate = Moving(is_far=True), Moving()
    both = DevicePlaces(reference, candidate, lambda: True, Looks(lambda: is_alone, lambda: is_idle))
    both.watches = watches
    for side, is_waited_for in ((reference, False), (candidate, True)):
        both.bring(side)
        assert both.was_busy() is (watches and not (is_alone and (is_idle or not is_waited_for)))
        assert not both.was_busy(), "it is told once"


def test_who_begins_once_its_inputs_come_is_seen_while_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the end it may be over: half a second was waited for it then, and it was forgiven."""
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.arena._PIECE", SIZE // 4)
    reference, candidate = Moving(is_far=True), Moving()
    candidate.shared.raw.fill_(5)
    came = list[int]()

    def is_alone() -> bool:
        came.append(sum(map(bool, os.pread(candidate.given[-1], SIZE, 0))) if candidate.given else 0)
        return came[-1] != SIZE // 2

    both = DevicePlaces(reference, candidate, lambda: True, Looks(is_alone, lambda: True))
    both.park()
    both.watches = True
    both.bring(candidate)
    assert came == [SIZE // 4, SIZE // 2, 3 * SIZE // 4, SIZE, SIZE]
    assert both.was_busy()


# ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────────

runners: list[Mover] = []


class Mover(runner.CudaRunner):
    """A candidate. `works`: when it computes what it is timed for; not then, where it has what it needs."""

    works = ""
    is_at_work = False
    stolen = 0
    made: torch.Tensor | None = None
    of: list[torch.Tensor] = []  # noqa: RUF012 - replaced, never changed

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        runners.append(self)

    def _own_inputs(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        values.flatten(self.slots[0], tensors)
        return tensors

    def _compute(self) -> None:
        self.of = [tensor.clone() for tensor in self._own_inputs()]
        with torch.no_grad():
            self.made = self.model(*self.of).clone()

    def _order(self, order: wire.Order, fds: list[int]) -> None:
        if not isinstance(order, wire.Move):
            super()._order(order, fds)
            return
        assert self._shared is not None
        if not fds and self.works == "when it has to leave":
            self._compute()
        self._shared.replace(fds[0] if fds else None)
        if fds and self.works == "when it comes":
            self._compute()
        if fds and self.works == "by a kernel that waits for inputs":
            self.is_at_work = True
            threading.Thread(target=self._spin, daemon=True).start()
        self.channel.send(wire.encode(wire.Ready()))

    def _spin(self) -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end and not all(bool(tensor.flatten()[-1] != 0) for tensor in self._own_inputs()):
            time.sleep(0)
        time.sleep(0.002)
        self._compute()
        self.is_at_work = False

    def _event(self, slot: int, nonce: int) -> wire.Timed:
        if not self.works:
            return super()._event(slot, nonce)
        if self.made is not None and all(map(torch.equal, self.of, self._own_inputs())):
            self.stolen += 1
        else:
            self._compute()
        assert self._shared is not None
        assert self.made is not None
        self._shared.view(self._outs[0][0]).copy_(self.made)
        self.made = None
        return wire.Timed(nonce, 2000.0, 1000.0, 2000.0)


class Pairs(CudaStopwatch):
    """Of ordinary forwards, and where both lay after each call: who was called comes first."""

    has_quiet_clock = False
    """Then only looks tell of others."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._sides.refused, self._empty, self.seen = "events", 0.0, set[tuple[bool, bool]]()
        assert self._sides.places.takes_turns
        self.sides, self.places, self.claims, self.pair = self._sides, self._sides.places, self._claims, self._pair
        self.many = self.claims._many

    def take(self, count: int) -> int:
        """So many were disturbed."""
        self.places.watches = True
        return sum(self.pair().polluted for _ in range(count))

    def _clock(self) -> tuple[float | None, str]:
        return (None, "") if self.has_quiet_clock else super()._clock()

    def _sample(self, session: Any) -> TimedCall:
        told, both = super()._sample(session), [self._sides.reference, self._sides.candidate]
        other: Any = both[session is both[0]]
        self.seen.add((session.shared.is_on_host, other.shared.is_on_host))
        return told

    def _timing(self, measured: Any) -> Any:
        return measured


def turns(
    monkeypatch: pytest.MonkeyPatch,
    is_busy: Callable[[], bool] = lambda: False,
    looks: bool = True,
) -> tuple[Pairs, Any, Any]:
    """With the sessions of both. `looks`: whether there is a calibration kernel."""
    monkeypatch.setattr(runner, "CudaRunner", Mover)
    found = far(monkeypatch, Offloaded(inputs=True))
    found.spares, found.has_neighbours = idle(), lambda: True
    session = cast(Any, found.open(cast(Any, None), Submission(SOURCE.replace("Model", "ModelNew"), "torch"), 5.0))
    found.attach(session)
    options = bench_options(sections.TimingBench(), "cpu")
    checker = Checker(cast(Any, None), found, options, random.Random(3), cast(Any, None))
    checker.session = session

    def beat() -> SimpleNamespace:
        host_ns = 2.1e6 if is_busy() else 1.3e5
        return SimpleNamespace(ns=1e5, mhz=1980.0, host_ns=host_ns)

    given = checker, found.session, options, random.Random(5), lambda: None, None
    return Pairs(*given, cast(Any, SimpleNamespace(beat=beat) if looks else None)), found, session


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("works", ["", "when it comes", "when it has to leave"])
def test_who_works_when_it_is_moved_has_no_inputs_to_work_on(monkeypatch: pytest.MonkeyPatch, works: str) -> None:
    """20 pairs of 20 passed, at fifty times its reference's speed; and 13 calls of 40 once it came without inputs."""
    watch, found, session = turns(monkeypatch)
    runners[-1].works = works
    assert watch.take(20) == 0
    assert runners[-1].stolen == 0
    assert watch.seen == {(False, True)}, "whose call is timed lies on the GPU, the other does not"
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_pairs_beside_work_that_was_begun_when_it_was_moved_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for its inputs needs no process that is awake: 31 of 40 passed."""
    watch, found, session = turns(monkeypatch, lambda: runners[-1].is_at_work)
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.stopwatch._PATIENCE_S", 0.2)
    runners[-1].works = "by a kernel that waits for inputs"
    assert watch.take(6) == 6
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_what_a_call_leaves_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, found, session = turns(monkeypatch, lambda: bool(left) and left.pop())
    left: list[bool] = []
    event = Mover._event

    def leaving(self: Mover, slot: int, nonce: int) -> wire.Timed:
        if self is runners[-1]:
            left.append(True)  # seen by the first beat, over by the second
        return event(self, slot, nonce)

    monkeypatch.setattr(Mover, "_event", leaving)
    assert watch.take(8) == 8
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_after_its_timing_a_candidate_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watches it once more would call it over nothing, and blame it for that."""
    watch, found, session = turns(monkeypatch)

    def measure(pair: Callable[[], object], *_: object) -> None:
        pair()
        while not session.shared.is_on_host:
            pair()

    for name, stand_in in (("measure", measure), ("_with_hidden", lambda measured, _: measured)):
        monkeypatch.setattr(f"kbrl_async.kernels.verify.cuda.stopwatch.{name}", stand_in)
    monkeypatch.setattr(Claims, "audit", lambda self: None)
    watch.take(1)
    watch.run()
    watch.close()
    assert (found.session.shared.is_on_host, session.shared.is_on_host) == (True, False)
    place(session, 0, found.sets[0])
    answered = session.call(wire.OP_RUN, 0, 5.0)
    assert torch.allclose(session.look(answered.tensors[0]), found.sets[0].expected[0], atol=1e-5)
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_where_nobody_can_look_no_pair_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is waited for."""
    watch, found, session = turns(monkeypatch, looks=False)
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.stopwatch._PATIENCE_S", 3600.0)
    assert watch.take(3) == 3
    measured = measure(watch.pair, _unseen(Recipe.of(sections.TimingBench())), time.monotonic)
    assert (measured.rejected, measured.stopped) == (2, DISTURBED), "and as few are taken as there may be"
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_what_was_busy_before_a_pair_is_not_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [True]
    watch, found, session = turns(monkeypatch, lambda: busy[0])
    watch.places.watches = True
    watch.sides.bring(watch.sides.reference)
    busy[0] = False
    assert watch.take(1) == 0
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_after_a_fault_the_gpu_is_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, found, session = turns(monkeypatch)
    watch.sides.bring(watch.sides.reference)
    assert not found.session.shared.is_on_host
    session.close()
    watch.close()
    assert found.session.shared.is_on_host
    found.close()


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_reference_that_can_not_leave_stays_unless_it_is_lost(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    """Where its memory is gone it would answer over nothing, and right kernels were called wrong."""
    watch, found, session = turns(monkeypatch)
    watch.sides.bring(watch.sides.reference)
    error = InfraError("memory of the GPU was lost") if is_lost else NoMemory("the host has none")
    monkeypatch.setattr(DeviceArena, "move", Mock(side_effect=error))
    with pytest.raises(InfraError, match="was lost") if is_lost else contextlib.nullcontext():
        watch.close()
    session.close()
    found.close()


MEASURED = Measured(Interval(2.0, 1.5, 2.5), 9, 0, 2.0, 1.0, 0.0, "enough")


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("is_told", [True, False])
def test_what_can_not_be_audited_is_no_evidence(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    """Pairs count what is seen in the window, and a time of whose calls nothing is known is nobody's success."""
    watch, found, session = turns(monkeypatch, lambda: True)
    polluted = list[bool]()

    def measure(pair: Callable[[], Pair], *_: object) -> Measured:
        polluted.append(pair().polluted)
        return MEASURED

    def audit(self: Claims) -> None:
        self.is_disturbed = not is_told

    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.stopwatch.measure", measure)
    monkeypatch.setattr(Claims, "audit", audit)
    watch.has_quiet_clock = True
    timed: Any = watch.run()
    watch.close()
    assert polluted == [True]
    assert (timed.stopped, timed.interval.lo) == (("enough", 1.5) if is_told else (DISTURBED, 1.0))
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("is_disturbed", [True, False])
def test_an_audit_moves_each_once_and_says_nothing_of_who_was_disturbed(
    monkeypatch: pytest.MonkeyPatch, is_disturbed: bool
) -> None:
    """Of calls that take much longer than is claimed."""
    busy = [True]
    watch, found, session = turns(monkeypatch, lambda: busy[0])
    watch.take(1)  # what was seen in it is not the audit's
    watch.places.look()
    busy[0] = is_disturbed
    moved, move = list[str](), DeviceArena.move

    def noted(self: DeviceArena, to_host: bool, *given: Any) -> None:
        if self.is_on_host is not to_host:
            moved.append(f"{'the reference' if self is found.session.shared else 'the candidate'} {to_host}")
        move(self, to_host, *given)

    monkeypatch.setattr(DeviceArena, "move", noted)

    def event(side: Any, wall_ns: int) -> None:
        monkeypatch.setattr(side, "events", lambda times, limit: TimedCall(1e6, wall_ns, 0.0, 1e6))

    event(found.session, 1_000_000)
    event(session, 1_000_000_000)
    monkeypatch.setattr(claims, "_CALLS", 1)
    with contextlib.nullcontext() if is_disturbed else pytest.raises(CandidateFault, match="longer than between"):
        watch.claims.audit()
    assert watch.claims.is_disturbed is is_disturbed
    assert len(moved) <= (4 if is_disturbed else 8), moved
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_memory_that_waits_on_the_host_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hoarder had to hold twice as much to be one."""
    found = far(monkeypatch, Offloaded(inputs=True))
    before = found.device_bytes + found.far_bytes
    found.session.move(to_host=False)
    assert found.session.shared.host_bytes == found.session.shared.device_bytes
    assert found.device_bytes + found.far_bytes == before
    assert found.host_bytes >= found.session.shared.size, "it is pinned all the same"
    found.close()


@pytest.mark.usefixtures("pretended")
def test_memory_of_the_host_that_it_has_is_room_for_its_next_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    found = far(monkeypatch, Offloaded(inputs=True))
    found.session.move(to_host=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    found._look_at_host()
    assert found._host_room >= found.session.shared.size // 2 > 0
    found.close()


@pytest.mark.usefixtures("pretended")
def test_of_who_is_watched_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, found, session = turns(monkeypatch)
    filled = list[int]()
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.stopwatch._LEFT_OUT", 1.0)
    fill = watch.sides.fill
    monkeypatch.setattr(watch.sides, "fill", lambda slots: (filled.append(1), fill(slots)))
    watch.take(3)
    assert len(filled) == 3
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_of_torch_itself_nothing_is_captured_to_be_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides' graphs hold what forward needs inside: 14 GiB that no plan had."""
    watch, found, session = turns(monkeypatch)
    capture = Mock()
    monkeypatch.setattr(watch.sides, "capture", capture)
    watch.prove(Candidate("", "torch"))
    capture.assert_not_called()
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_what_a_call_of_an_audit_leaves_behind_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, found, session = turns(monkeypatch, lambda: bool(left) and left.pop())
    left: list[bool] = []
    watch.take(1)

    def events(times: int, limit: float) -> TimedCall:
        left.append(True)
        return TimedCall(1e6, 1_000_000, 0.0, 1e6)

    monkeypatch.setattr(session, "events", events)
    assert watch.many(session, 2) is None
    left.clear()
    session.close()
    found.close()
