"""The bench's side of players: the living one, a prewarmed spare, and the memory that they work in.

::

    host.load(images, plan) ─▶ host.ask(order) … ─▶ host.unload() (canary)
    no answer in time, a fault of the device, a canary off key ─▶ that player is killed, the spare takes over
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Child, Isolation, Limits, Zygote
from kbrl_async.kernels.stages import tally
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.cuda import starting
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.dying import Dying
from kbrl_async.kernels.verify.cuda.replay import orders
from kbrl_async.kernels.verify.cuda.replay.images import Image
from kbrl_async.kernels.verify.memory import memory_file, seal
from kbrl_async.kernels.verify.recording import Recording, encode
from kbrl_async.kernels.verify.session import CandidateFault
from protocols.records import Fault

ENTRY = "kbrl_async.kernels.verify.cuda.replay.player:main"
_ORDER_S = 10.0
_NAME = "a process that replays"
_CPU_S = 1 << 20
_SLOW, _SLOW_NS = 5.0, 2_000_000.0
"""A known kernel that takes so many times what it took at first, and so much more."""
_MOST_HELD, _LITTLE_HELD = 4 << 30, 256 << 20
_MOST_SERVED = 256
"""What kernels of one candidate leave in a player shows in the known kernel; if not, it is gone after so many."""
_SPARE_FACTOR = 4
_Expected = TypeVar("_Expected", bound=orders.Answer)


class Unreplayable(Exception):  # noqa: N818 - an answer, not an error
    """Why a recording can't be done again, in words; nobody's fault."""


class ShortOfMemory(Unreplayable):
    """There is no memory to do it in, now."""


class PlayerProcess:
    """One process that replays."""

    def __init__(self, zygote: Zygote, limits: Limits, device: str) -> None:
        limits = msgspec.structs.replace(limits, cpu_s=_CPU_S)
        tally("contexts made")
        self.child: Child = zygote.spawn(ENTRY, device.encode(), (), limits)
        self._isolation: Isolation | None = None
        self.mapped: DeviceArena | None = None
        self.first_ns = 0.0
        """Of the known kernel, when it ran for the first time after a candidate."""
        self.served = self.held = 0
        """Candidates, and bytes of memory of its own that it keeps."""

    @property
    def isolation(self) -> Isolation:
        return self._begun()

    def _begun(self) -> Isolation:
        """Waits for its first word."""
        if self._isolation is None:
            confined = starting.confined(self.child, _NAME)
            self._isolation = Isolation(confined.level, confined.missing)
        return self._isolation

    def settle(self) -> None:
        """Until it has its context."""
        if self._isolation is None:
            select.select([self.child.channel], [], [], starting.CONFINED_S)

    def ask(self, kind: type[_Expected], order: orders.Order, deadline_s: float, fd: int | None = None) -> _Expected:
        """:raises CandidateFault: what runs there faults, or does not end in time: the process is of no use any more.
        :raises Unreplayable: it can't be done there.
        """
        self._begun()
        data = orders.encode(order)
        try:
            socket.send_fds(self.child.channel, [data], [] if fd is None else [fd])
        except ConnectionError as error:
            raise InfraError(f"{_NAME} is gone", starting.CURE) from error
        return self._receive(kind, deadline_s)

    def _receive(self, kind: type[_Expected], deadline_s: float) -> _Expected:
        if not DeviceTurns.answers(self.child.channel, deadline_s, self.child) and not self._answers_late():
            raise CandidateFault(Fault.TIMEOUT, f"no result after {deadline_s:.2f} s")
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self.child.channel.recv(orders.MAX_MESSAGE)
        if not data:
            raise InfraError(f"{_NAME} has ended", starting.CURE)
        try:
            answer: orders.Answer = orders.decode_answer(data)
        except msgspec.MsgspecError as error:
            raise InfraError(f"{_NAME} answers nonsense ({error})"[:300], starting.CURE) from error
        if isinstance(answer, wire.Failed):
            raise CandidateFault(Fault(answer.kind), answer.text)
        if isinstance(answer, orders.CannotReplay):
            raise Unreplayable(answer.text)
        if not isinstance(answer, kind):
            raise InfraError(f"{_NAME} answers something else than was asked", starting.CURE)
        return answer

    def _answers_late(self) -> bool:
        """While the driver clears away a fault of another process, nobody's work goes on."""
        torch.cuda.synchronize()
        return bool(select.select([self.child.channel], [], [], 0.0)[0])


class ReplayHost:
    """One for a bench and its GPU. Call it from one thread."""

    def __init__(self, zygote: Zygote, limits: Limits, device: str) -> None:
        self._zygote, self._limits, self._device = zygote, limits, device
        self._player: PlayerProcess | None = None
        self._spare: PlayerProcess | None = None
        self._dying = Dying()
        self._generation = -1
        self._arena: DeviceArena | None = None
        self._is_spoilt = False
        """One that is being killed may still write into the arena."""
        self.is_short = False
        """Whether an operator of this candidate's found too little memory: its library keeps the way that it took."""
        self._loaded: tuple[list[Image], Recording] | None = None

    @property
    def arena(self) -> DeviceArena:
        assert self._arena is not None, "reserve comes first"
        return self._arena

    @property
    def isolation(self) -> Isolation:
        return starting.first_that_starts(self._confined)

    def reserve(self, size: int, is_new: bool = False) -> DeviceArena:
        """Memory to replay in; at other places of the device's than before where `is_new`.

        :raises CudaError: it is not there.
        """
        known, is_new = self._arena, is_new or self._is_spoilt
        self._is_spoilt = False
        if known is not None and not is_new and size <= known.size <= _SPARE_FACTOR * size:
            return known
        made = DeviceArena.new(max(size, 0 if known is None or not is_new else known.size), torch.device(self._device))
        if known is not None:
            known.close()
        self._arena = made
        return made

    def load(self, images: list[Image], plan: Recording) -> bool:
        """Whether operators have to be warmed up.

        :raises Unreplayable: it can't be loaded.
        :raises InfraError: the host starts no process to load it in.
        """
        self._loaded = images, plan
        self._mapped()  # whatever ends it by now is nothing of this candidate's
        with _file(images, plan) as (fd, length):
            order = orders.LoadProgram([(image.digest, list(map(len, image.parts))) for image in images], length)
            try:
                answer = self._ask(orders.Loaded, order, _ORDER_S, fd)
            except InfraError as error:
                raise Unreplayable("a process that replays ended when it loaded it") from error
        if answer.refused:
            raise Unreplayable(answer.refused)
        return answer.has_operators

    def done(self, order: orders.WarmUp | orders.RunForward, deadline_s: float) -> None:
        self.is_short |= self._ask(orders.RunDone, order, deadline_s).is_short

    def timed(self, order: orders.Time, deadline_s: float) -> float:
        """Nanoseconds."""
        told = self._ask(orders.Times, order, deadline_s)
        self.is_short |= told.is_short
        return told.elapsed_ns

    def revive(self) -> DeviceArena:
        """What was loaded, in a player that lives, and in memory that the one before it can't reach."""
        assert self._loaded is not None
        arena = self.reserve(self.arena.size, is_new=True)
        self.load(*self._loaded)
        return arena

    @property
    def device_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.size

    def shrink(self, size: int) -> None:
        """Between two candidates: no more than so much memory, in the same process.

        :raises CudaError: not even that is there.
        """
        if self._arena is None or self._arena.size <= size:
            return
        self._forget_the_dead()
        if self._player is not None and self._player.held > _LITTLE_HELD:
            self._drop()
        self._dying.close()
        self._arena.close()
        self._arena, self._is_spoilt = None, False
        self._arena = DeviceArena.new(size, torch.device(self._device))
        if self._player is not None:
            with contextlib.suppress(InfraError):
                self._with_arena()

    def unload(self) -> None:
        """After a candidate. A player whose known kernel is wrong, or far too slow, is replaced."""
        was_short, self.is_short = self.is_short, False
        self._loaded = None
        player = self._player
        if player is None:
            return
        try:
            sung = player.ask(orders.Sung, orders.Unload(), _ORDER_S)
        except (CandidateFault, InfraError, Unreplayable):
            self._drop()
            return
        player.first_ns = player.first_ns or sung.elapsed_ns
        is_slow = sung.elapsed_ns > _SLOW * player.first_ns + _SLOW_NS
        player.served, player.held = player.served + 1, sung.held
        if was_short or not sung.is_right or is_slow or sung.held > _MOST_HELD or player.served >= _MOST_SERVED:
            self._drop()

    def refill(self) -> None:
        """Start the spare; returns at once."""
        self._forget_the_dead()
        if self._spare is None:
            with contextlib.suppress(InfraError):  # whoever needs one next will meet it again
                self._spare = self._started()

    def settle(self) -> None:
        for player in (self._player, self._spare):
            if player is not None:
                player.settle()

    def close(self) -> None:
        for player in (self._player, self._spare):
            if player is not None:
                player.child.close()
        self._player, self._spare = None, None
        self._dying.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _ask(self, kind: type[_Expected], order: orders.Order, deadline_s: float, fd: int | None = None) -> _Expected:
        try:
            return self._mapped().ask(kind, order, deadline_s, fd)
        except (CandidateFault, InfraError):
            self._drop()
            raise

    def renew(self) -> None:
        """What kernels of earlier candidates may have left in the player is no part of what comes."""
        self._drop()

    def _mapped(self) -> PlayerProcess:
        """One that lives, with the arena. A start that fails is nobody's fault."""
        return starting.first_that_starts(self._with_arena)

    def _confined(self) -> Isolation:
        try:
            return self._ready().isolation
        except InfraError:
            self._drop()
            raise

    def _with_arena(self) -> PlayerProcess:
        try:
            player = self._ready()
            self._map(player)
        except InfraError:
            self._drop()
            raise
        return player

    def _ready(self) -> PlayerProcess:
        self._forget_the_dead()
        if self._player is None:
            self._player, self._spare = self._spare or self._started(), None
        return self._player

    def _map(self, player: PlayerProcess) -> None:
        if player.mapped is self.arena:
            return
        fd = self.arena.export()
        try:
            player.ask(orders.RunDone, orders.MapArena(self.arena.size), _ORDER_S, fd)
        except CandidateFault as fault:
            raise starting.failed(_NAME, fault.text, fault.kind is Fault.OUT_OF_MEMORY) from fault
        finally:
            os.close(fd)
        player.mapped = self.arena

    def _started(self) -> PlayerProcess:
        player = PlayerProcess(self._zygote, self._limits, self._device)
        self._generation = self._zygote.generation
        return player

    def _drop(self) -> None:
        if self._player is not None:
            self._dying.add(self._player.child)
            self._player, self._is_spoilt = None, True

    def _forget_the_dead(self) -> None:
        """They die with their zygote, too."""
        for name in ("_player", "_spare"):
            player = getattr(self, name)
            if player is not None and (self._generation != self._zygote.generation or player.child.has_ended()):
                player.child.close()
                setattr(self, name, None)


@contextlib.contextmanager
def _file(images: list[Image], plan: Recording) -> Iterator[tuple[int, int]]:
    """Both in one sealed file in memory, and the length of the plan, which comes last."""
    fd = memory_file("replay")
    try:
        encoded = encode(plan)
        for content in (*(part for image in images for part in image.parts), encoded):
            left = memoryview(content)
            while left:
                left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seal(fd)
        yield fd, len(encoded)
    finally:
        os.close(fd)
