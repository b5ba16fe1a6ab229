"""Processes on a GPU that end before they have met anything, with stand-ins: another one is tried, and why is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY, Mock

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Isolation, Limits
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import recording, replies, wire
from kbrl_async.kernels.verify.cuda import runner, starting
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.record import child as recorder
from kbrl_async.kernels.verify.cuda.replay import orders, player
from kbrl_async.kernels.verify.cuda.replay.host import ReplayHost
from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.cuda.starting import TRIES, NoRoom, NotStarted
from kbrl_async.kernels.verify.hoarding import NoMemory

CONFINED = wire.Confined("full", ())
ENDS = wire.Failed("runtime_error", "it says nothing, and ends")
SHORT = wire.Failed("out_of_memory", "AcceleratorError: CUDA error: out of memory")


Start = Callable[..., "Spares"]


class Arena:
    """Memory of no device."""

    size = 1 << 20

    def export(self) -> int:
        return os.open("/dev/null", os.O_RDONLY)


class Child:
    """Says these words, then has ended."""

    def __init__(self, *words: wire.Reply | orders.Answer) -> None:
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for word in words:
            if word is not ENDS:
                self._theirs.send(wire.encode(word))
        if CONFINED not in words or ENDS in words:
            self._theirs.close()
        self.is_dying, self.host_pid = False, 0

    def has_ended(self, within_s: float = 0.0) -> bool:
        return False

    def signal(self, number: int) -> None:
        self.is_dying = True

    def ending(self, within_s: float) -> str:
        return "it ended with exit code 70"

    def close(self) -> None:
        self.channel.close()
        self._theirs.close()


class Spares:
    """Of these children one after the other, the last one again and again; also what spawns them."""

    generation = -1

    def __init__(self, *starts: tuple[wire.Reply | orders.Answer, ...]) -> None:
        self.starts, self.taken = starts, list[Child]()
        self.dying = SimpleNamespace(add=lambda child: child.signal(9))

    def take(self) -> Child:
        self.taken.append(Child(*self.starts[min(len(self.taken), len(self.starts) - 1)]))
        return self.taken[-1]

    def spawn(self, *_: Any) -> Child:
        return self.take()


@pytest.fixture
def start() -> Iterator[Callable[..., Spares]]:
    made: list[Spares] = []

    def begin(*starts: tuple[wire.Reply | orders.Answer, ...]) -> Spares:
        made.append(Spares(*starts))
        return made[-1]

    yield begin
    for child in (child for spares in made for child in spares.taken):
        child.close()


def session(spares: Spares) -> CudaSession:
    setup = wire.Setup("", "Model", 1, device="cpu")
    return CudaSession(cast(Any, None), setup, (), Limits(), 1.0, cast(Any, spares))


def host(spares: Spares) -> ReplayHost:
    return ReplayHost(cast(Any, spares), Limits(), "cuda:0")


def test_a_session_whose_process_dies_at_its_start_takes_another(start: Start) -> None:
    spares = start((), (), (CONFINED, wire.Ready()))
    assert session(spares).isolation == Isolation("full", ())
    assert [child.is_dying for child in spares.taken] == [True, True, False]


def test_a_player_that_dies_at_its_start_is_followed_by_another(start: Start) -> None:
    spares = start((), (), (CONFINED,))
    assert host(spares).isolation == Isolation("full", ())
    assert len(spares.taken) == 3


@pytest.mark.parametrize("begin", [session, lambda spares: host(spares).isolation])
def test_only_after_three_the_host_is_to_blame_and_nobody_else(start: Start, begin: Any) -> None:
    spares = start(())
    with pytest.raises(NotStarted, match="did not start in its sandbox: it ended with exit code 70"):
        begin(spares)
    assert len(spares.taken) == TRIES


@pytest.mark.parametrize("begin", [session, lambda spares: host(spares).isolation])
def test_memory_that_a_start_does_not_find_is_waited_for(start: Start, begin: Any) -> None:
    """`NoMemory`: the bench gives back what it keeps, and judges once more."""
    spares = start((SHORT,))
    with pytest.raises(NoMemory, match="out of memory"):
        begin(spares)
    assert len(spares.taken) == 1


def test_a_player_that_does_not_start_in_time_is_nobodys_timeout(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceTurns, "answers", lambda *_: False)
    with pytest.raises(NotStarted, match="was not ready after 30 s"):
        _ = host(start(())).isolation


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("is_timed", [False, True])
def test_a_player_that_found_too_little_memory_serves_nobody_else(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_short: bool, is_timed: bool
) -> None:
    """Its library keeps the way that it took, and is refused nothing any more."""
    monkeypatch.setattr(DeviceArena, "new", lambda *_: Arena())
    last = orders.Times(1.0, is_short) if is_timed else orders.RunDone(is_short)
    spares = start((CONFINED, orders.RunDone(), orders.RunDone(), last, orders.Sung(True, 1.0, 0)))
    made = host(spares)
    made.reserve(1)
    made.done(orders.WarmUp(0), 1.0)
    assert not made.is_short
    if is_timed:
        made.timed(orders.Time((0,)), 1.0)
    else:
        made.done(orders.RunForward(0), 1.0)
    assert made.is_short is is_short
    made.unload()
    assert not made.is_short
    assert spares.taken[0].is_dying is is_short


@pytest.mark.parametrize(
    ("answer", "raised", "tries"),
    [(SHORT, NoRoom, 1), (wire.Failed("runtime_error", "not mapped"), NotStarted, TRIES), (None, InfraError, TRIES)],
)
def test_a_player_that_gets_no_arena_is_no_reason_to_watch_the_candidate(
    start: Start, answer: wire.Reply | None, raised: type[Exception], tries: int
) -> None:
    spares = start((CONFINED, answer or ENDS))
    made = host(spares)
    made._arena = cast(Any, Arena())
    with pytest.raises(raised):
        made.load([], recording.Recording([], [], 0))
    assert len(spares.taken) == tries


@pytest.mark.parametrize(("took_s", "tries"), [(0.0, TRIES), (31.0, 1)])
def test_a_start_that_took_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, took_s: float, tries: int) -> None:
    """On a host that hangs a bench would stand still for minutes, and lose its work."""
    now, started = [0.0], Mock(side_effect=NotStarted("it was not ready"))

    def begin() -> None:
        now[0] += took_s
        started()

    monkeypatch.setattr(starting.time, "monotonic", lambda: now[0])
    with pytest.raises(NotStarted):
        starting.first_that_starts(begin)
    assert started.call_count == tries


@pytest.mark.parametrize(("module", "first"), [(runner, "own_graphs"), (recorder, "Recorder"), (player, "Places")])
def test_what_goes_wrong_in_a_start_is_said(module: Any, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fails = Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    fails.install = fails
    monkeypatch.setattr(module.runner, "mute", lambda: None)
    monkeypatch.setattr(module, first, fails)
    with ours, theirs:
        # A player switches gradients off, for good in a process of its own.
        with pytest.raises(RuntimeError), torch.enable_grad():
            module.main(theirs, b"cuda:0", [], Isolation("full", ()))
        ours.settimeout(5)
        said = replies.read(ours.recv(wire.MAX_REPLY))
    assert isinstance(said, wire.Failed)
    assert said.kind == "out_of_memory"
    assert said.text.endswith("RuntimeError: CUDA error: out of memory"), said.text


def test_a_recorder_says_why_it_has_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = recorder.Recorder.__new__(recorder.Recorder)
    made._channel = theirs
    monkeypatch.setattr(made, "_map", Mock(side_effect=RuntimeError("CUDA_ERROR_OUT_OF_MEMORY in cuMemMap")))
    with ours, theirs:
        socket.send_fds(ours, [wire.encode(wire.Map(1 << 20))], [theirs.fileno()])
        with pytest.raises(RuntimeError):
            made.serve()
        ours.settimeout(5)
        assert replies.read(ours.recv(wire.MAX_REPLY)) == wire.Failed("out_of_memory", ANY)
