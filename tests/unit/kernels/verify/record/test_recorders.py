"""The handle on recorders, with processes that are stand-ins: who serves whom, and when a fresh one is asked."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.verify import recording, wire
from kbrl_async.kernels.verify.cuda import starting
from kbrl_async.kernels.verify.cuda.prewarmed import PrewarmedChildren
from kbrl_async.kernels.verify.cuda.record import session
from kbrl_async.kernels.verify.cuda.record.session import Recorders

SETUP = wire.Setup("", "ModelNew", 1)
ORDER = wire.RecordForward(SETUP, ["L", []], [[]], 0)
RIGHT, REFUSED = recording.Recording(used=512), recording.Recording(refused="it reads from the device")
Answer = Callable[["Process"], "recording.Recording | None"]


class Process:
    """A recorder whose candidates are answered by `answer`; None ends it."""

    def __init__(self, number: int, answer: Answer) -> None:
        self.number, self.served, self.is_killed, self.mapped = number, 0, False, 0
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answer = answer
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()

    def serve(self) -> None:
        self._theirs.send(wire.encode(wire.Confined("full", ())))
        while True:
            data, fds, _, _ = socket.recv_fds(self._theirs, wire.MAX_REPLY, 8)
            if not data:
                return
            if isinstance(order := wire.decode_recorder_order(data), wire.Map):
                self.mapped = order.size
                self._theirs.send(wire.encode(wire.Ready()))
            else:
                self.served += 1
                found = self._answer(self)
                if found is None:
                    self._theirs.close()
                    return
                self._theirs.send(wire.encode(wire.Recorded(os.pwrite(fds[0], wire.encode(found), 0))))
            for fd in fds:
                os.close(fd)

    def signal(self, number: int) -> None:
        self.is_killed = True

    def has_ended(self) -> bool:
        return self.is_killed

    def ending(self, within_s: float) -> str:
        return "it was ended by signal 6 (SIGABRT)"

    def close(self) -> None:
        self.is_killed = True
        self.channel.close()
        self._thread.join(5)
        self._theirs.close()


class Zygote:
    generation = 1

    def __init__(self, answer: Answer) -> None:
        self.processes: list[Process] = []
        self._answer = answer

    def spawn(self, *_: Any) -> Process:
        self.processes.append(Process(len(self.processes), self._answer))
        return self.processes[-1]


class Arena:
    """Memory of no device."""

    made = 0

    def __init__(self, size: int) -> None:
        Arena.made += 1
        self.size = size

    @classmethod
    def new(cls, size: int, device: object) -> Arena:
        return cls(size)

    def export(self) -> int:
        return os.open("/dev/null", os.O_RDONLY)

    def close(self) -> None:
        """Nothing to free."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Recorders, Zygote]]]:
    monkeypatch.setattr(session, "DeviceArena", Arena)
    monkeypatch.setattr(session.torch.cuda, "synchronize", lambda: None)
    made: list[Recorders] = []
    zygotes: list[Zygote] = []
    waiting: list[PrewarmedChildren] = []

    def begin(
        answer: Answer, most_served: int = 64, patience: session.Patience = session.PATIENCE
    ) -> tuple[Recorders, Zygote]:
        zygote = Zygote(answer)
        zygotes.append(zygote)
        waiting.append(session.spares_for(cast(Any, zygote), Limits(), "cuda:0", 1))
        made.append(Recorders(waiting[-1], "cuda:0", 1 << 20, most_served, patience))
        return made[-1], zygote

    yield begin
    for one in (*made, *waiting, *(process for zygote in zygotes for process in zygote.processes)):
        one.close()


def record(recorders: Recorders, deadline_s: float = 5.0, order: wire.RecordForward = ORDER) -> recording.Recording:
    content = recorders.record(order, (), deadline_s, lambda arena: None)
    found: recording.Recording = recording.decode(content)
    return found


Start = Callable[..., tuple[Recorders, Zygote]]


def test_who_is_recorded_in_brief_is_not_waited_for_much_longer_than_others(start: Start) -> None:
    last = threading.Event()
    recorders, _ = start(
        lambda process: None if process.served > 9 and last.wait(20) else RIGHT,
        patience=session.Patience(least_s=0.1),
    )
    brief = msgspec.structs.replace(ORDER, is_brief=True)
    assert [record(recorders, order=brief) for _ in range(9)] == [RIGHT] * 9
    began = time.monotonic()
    assert record(recorders, 20.0, brief).refused == "its recorder did not answer in time"
    assert time.monotonic() - began < 15
    last.set()


@pytest.mark.parametrize(("known", "is_brief"), [(3, True), (9, False)])
def test_else_the_whole_deadline_is_waited_for(start: Start, known: int, is_brief: bool) -> None:
    recorders, _ = start(
        lambda process: RIGHT if process.served <= known else time.sleep(0.5) or RIGHT,
        patience=session.Patience(least_s=0.0, times=0.0),
    )
    order = msgspec.structs.replace(ORDER, is_brief=is_brief)
    assert [record(recorders, order=order) for _ in range(known + 1)] == [RIGHT] * (known + 1)


def test_one_process_serves_many_candidates(start: Start) -> None:
    recorders, zygote = start(lambda process: RIGHT)
    assert [record(recorders) for _ in range(5)] == [RIGHT] * 5
    assert [process.served for process in zygote.processes] == [5]
    assert not recorders.is_fresh


def test_the_first_candidate_of_a_process_is_refused_once(start: Start) -> None:
    recorders, zygote = start(lambda process: REFUSED)
    assert record(recorders) == REFUSED
    assert [process.served for process in zygote.processes] == [1]


def test_whoever_is_recorded_alone_has_other_memory(start: Start) -> None:
    recorders, zygote = start(lambda process: REFUSED if process.served > 1 else RIGHT)
    record(recorders)
    assert record(recorders) == REFUSED
    assert not recorders.is_fresh
    arenas = Arena.made
    recorders.forget()
    assert record(recorders) == RIGHT
    assert [process.served for process in zygote.processes] == [2, 1]
    assert recorders.is_fresh
    assert zygote.processes[0].is_killed
    assert Arena.made == arenas + 1


@pytest.mark.parametrize(("left", "served"), [(0, [2]), (512, [1, 1])])
def test_more_memory_is_for_the_same_process_unless_something_is_left_in_the_old(
    start: Start, left: int, served: list[int]
) -> None:
    recorders, zygote = start(lambda process: RIGHT)
    record(recorders)
    recorders._left = left
    recorders.resize(1 << 22)
    assert recorders.arena.size == 1 << 22
    record(recorders)
    assert [process.served for process in zygote.processes] == served
    assert [process.mapped for process in zygote.processes][-1] == 1 << 22


def test_a_process_that_takes_no_more_memory_is_replaced(start: Start) -> None:
    recorders, zygote = start(lambda process: None if process.served > 1 else RIGHT)
    record(recorders)
    assert record(recorders).refused
    recorders.resize(1 << 22)
    assert record(recorders) == RIGHT
    assert [process.served for process in zygote.processes] == [2, 1]


def test_where_there_is_no_memory_beside_the_old_the_process_that_holds_it_goes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders, zygote = start(lambda process: RIGHT)
    record(recorders)

    def new(size: int, device: object) -> Arena:
        if not zygote.processes[0].is_killed:
            raise CudaError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        return Arena(size)

    monkeypatch.setattr(Arena, "new", new)
    recorders.resize(1 << 22)
    assert record(recorders) == RIGHT
    assert [process.served for process in zygote.processes] == [1, 1]


def test_a_process_that_ends_is_replaced_and_the_candidate_is_refused_in_words(start: Start) -> None:
    recorders, _ = start(lambda process: None if process.number < 2 and process.served else RIGHT)
    assert record(recorders).refused == "its recorder ended"
    assert record(recorders).refused == "its recorder ended"
    assert record(recorders) == RIGHT


@pytest.mark.parametrize(("earlier", "is_fresh"), [(0, True), (1, False)])
def test_who_ends_a_process_that_served_others_is_found_out_once_more(
    start: Start, earlier: int, is_fresh: bool
) -> None:
    """Those may have laid that for whoever comes next."""
    recorders, _ = start(lambda process: RIGHT if process.served <= earlier else None)
    for _ in range(earlier):
        record(recorders)
    assert record(recorders).refused == "its recorder ended"
    assert recorders.is_fresh == is_fresh


def test_a_process_that_does_not_answer_is_killed_in_time(start: Start) -> None:
    forever = threading.Event()

    def wait(process: Process) -> recording.Recording | None:
        forever.wait(250)
        return None

    recorders, zygote = start(wait)
    assert record(recorders, 0.05).refused == "its recorder did not answer in time"
    assert zygote.processes[0].is_killed
    forever.set()


def test_whoever_asks_for_it_is_recorded_by_a_fresh_process(start: Start) -> None:
    recorders, zygote = start(lambda process: RIGHT)
    record(recorders)
    recorders.forget()
    record(recorders)
    assert [process.served for process in zygote.processes] == [1, 1]


def test_a_process_retires_after_many_candidates(start: Start) -> None:
    recorders, zygote = start(lambda process: RIGHT, 2)
    for _ in range(5):
        record(recorders)
    assert [process.served for process in zygote.processes] == [2, 2, 1]


def test_words_that_no_recorder_says_are_its_end(start: Start) -> None:
    def lie(process: Process) -> None:
        process._theirs.send(b"\xff\x00nonsense")

    recorders, _ = start(lie)
    assert record(recorders).refused == "its recorder ended"


def test_a_host_that_starts_none_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "CONFINED_S", 0.01)
    monkeypatch.setattr(Process, "serve", lambda self: None)
    recorders, zygote = start(lambda process: RIGHT)
    with pytest.raises(InfraError, match="a recorder did not start in its sandbox: it was not ready after"):
        record(recorders)
    assert len(zygote.processes) == 1, "one that takes so long is not tried again"


def _dies(process: Process) -> None:
    process._theirs.close()


def _dies_with_its_arena(process: Process) -> None:
    _takes_its_arena(process)
    process._theirs.close()


def _takes_its_arena(process: Process) -> None:
    process._theirs.send(wire.encode(wire.Confined("full", ())))
    _, fds, _, _ = socket.recv_fds(process._theirs, wire.MAX_REPLY, 8)
    os.close(fds[0])


def _finds_no_memory_for_its_arena(process: Process) -> None:
    _takes_its_arena(process)
    process._theirs.send(wire.encode(wire.Failed("out_of_memory", "CUDA_ERROR_OUT_OF_MEMORY in cuMemMap")))


def _says(what: wire.Reply) -> Callable[[Process], None]:
    return lambda process: cast(None, process._theirs.send(wire.encode(what)))


def only_the_first(monkeypatch: pytest.MonkeyPatch, starts: Callable[[Process], None], count: int) -> None:
    """So many processes start like this, later ones as they should."""
    serve = Process.serve
    monkeypatch.setattr(Process, "serve", lambda self: starts(self) if self.number < count else serve(self))


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (_dies, "ended by signal 6"),
        (_dies_with_its_arena, "ended by signal 6"),
        (_says(wire.Failed("runtime_error", "MemoryError: addresses\nare taken")), "MemoryError: addresses are taken"),
        (_says(wire.Ready()), "something else first"),
    ],
)
def test_who_dies_before_its_first_candidate_is_nobodys_fault(
    start: Start, monkeypatch: pytest.MonkeyPatch, starts: Callable[[Process], None], words: str
) -> None:
    only_the_first(monkeypatch, starts, starting.TRIES - 1)
    recorders, zygote = start(lambda process: RIGHT)
    assert record(recorders) == RIGHT
    assert [process.served for process in zygote.processes] == [0] * (starting.TRIES - 1) + [1]
    assert recorders.is_fresh
    recorders.forget()
    only_the_first(monkeypatch, starts, 99)
    with pytest.raises(starting.NotStarted, match=words):
        record(recorders)


@pytest.mark.parametrize(
    "starts", [_says(wire.Failed("out_of_memory", "CUDA error: out of memory")), _finds_no_memory_for_its_arena]
)
def test_a_recorder_without_memory_for_its_context_or_arena_is_not_tried_again_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, starts: Callable[[Process], None]
) -> None:
    only_the_first(monkeypatch, starts, 99)
    recorders, zygote = start(lambda process: RIGHT)
    with pytest.raises(starting.NoRoom, match="no memory for a recorder"):
        record(recorders)
    assert len(zygote.processes) == 1
