"""The handle on recorders, with processes that are stand-ins: who serves whom, and when a fresh one is asked."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.verify import recording, wire
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
        self.number, self.served, self.is_killed = number, 0, False
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._theirs.send(wire.encode(wire.Confined("full", ())))
        while True:
            data, fds, _, _ = socket.recv_fds(self._theirs, wire.MAX_REPLY, 8)
            if not data:
                return
            if isinstance(wire.decode_recorder_order(data), wire.Map):
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

    def begin(answer: Answer, most_served: int = 64) -> tuple[Recorders, Zygote]:
        zygote = Zygote(answer)
        zygotes.append(zygote)
        waiting.append(session.spares_for(cast(Any, zygote), Limits(), "cuda:0", 1))
        made.append(Recorders(waiting[-1], "cuda:0", 1 << 20, most_served))
        return made[-1], zygote

    yield begin
    for one in (*made, *waiting, *(process for zygote in zygotes for process in zygote.processes)):
        one.close()


def record(recorders: Recorders, deadline_s: float = 5.0, order: wire.RecordForward = ORDER) -> recording.Recording:
    content = recorders.record(order, (), deadline_s, lambda arena: None)
    found: recording.Recording = recording.decode(content)
    return found


Start = Callable[..., tuple[Recorders, Zygote]]


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


def test_more_memory_is_the_next_processs(start: Start) -> None:
    recorders, zygote = start(lambda process: RIGHT)
    record(recorders)
    recorders.grow(1 << 22)
    assert recorders.arena.size == 1 << 22
    record(recorders)
    assert [process.served for process in zygote.processes] == [1, 1]


def test_a_process_that_ends_is_replaced_and_the_candidate_is_refused_in_words(start: Start) -> None:
    recorders, _ = start(lambda process: None if process.number < 2 and process.served else RIGHT)
    assert record(recorders).refused == "its recorder ended"
    assert record(recorders).refused == "its recorder ended"
    assert record(recorders) == RIGHT


def test_a_process_that_does_not_answer_is_killed_in_time(start: Start) -> None:
    forever = threading.Event()

    def wait(process: Process) -> recording.Recording | None:
        forever.wait(10)
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
    monkeypatch.setattr(session, "_CONFINED_S", 0.01)
    monkeypatch.setattr(Process, "_serve", lambda self: None)
    recorders, _ = start(lambda process: RIGHT)
    with pytest.raises(InfraError, match="did not start"):
        record(recorders)
