"""Quiet windows in a process: `PauseGate` holds a sampler's or learner's steps back, `QuietWindows` asks for a bench.

::

    bench thread ─ with windows.open(): ─▶ QuietRequest ─▶ broker ─ Pause ─▶ Gate ─┐ the step that runs ends,
        ▲                                                                            │ `breathe` blocks, jobs wait
        └──────────── QuietGrant ◀── all Paused, or some are missing ◀── Paused ◀──┘

Invariants
* Nobody waits for ever: a gate opens by its own clock, and a window that is not granted in time says so.
* All of it is used from the loop's thread, but for `breathe` and `open`, which block: working threads call them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import msgspec

from kbrl_async.errors import InfraError
from protocols import messages as msg
from protocols.quiet import Pauses

REPEAT_S = 0.5
Send = Callable[[msg.Message], None]


def shared_resources(device: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of what a process on `device` loads: this host's cores, the one GPU that is named (`cuda:1`), or for
    `cuda` all that `CUDA_VISIBLE_DEVICES` lists.
    """
    host = socket.gethostname()
    if not device.startswith("cuda"):
        return [f"{host}/cpu"]
    listed = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    index = device.partition(":")[2]
    if index:
        listed = [listed[int(index)] if listed else index]
    return [f"{host}/gpu{name}" for name in listed or ["0"]]


class PauseGate:
    """Stops the steps of a worker that shares a resource, between two of them.

    It answers for the worker when nothing runs: at once where there is no job or the working thread stands already,
    else when that comes by `breathe`, and in no case before what is `unstoppable` ends. Jobs that start meanwhile wait.
    """

    def __init__(self, clock: Callable[[], float], send: Send, is_idle: Callable[[], bool]) -> None:
        self._clock, self._send, self._is_idle = clock, send, is_idle
        self._pauses = Pauses()
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.standing = self._at_work = self._unstoppable = self._waiting = 0
        self.held_s = 0.0
        """Time that working threads stood here."""

    def handle(self, message: msg.Pause | msg.Resume) -> None:
        self._loop = asyncio.get_running_loop()
        with self._changed:
            if isinstance(message, msg.Pause):
                self._pauses.pause(message, self._clock())
            else:
                self._pauses.resume(message.window_id)
            self._changed.notify_all()
        self.look()

    @property
    def is_open(self) -> bool:
        with self._changed:
            return self._pauses.is_open(self._clock())

    def look(self) -> None:
        """Answer if nothing runs; called whenever that may have changed."""
        is_idle = not self._at_work and self._is_idle()
        if not self.is_open and not self._unstoppable and (self.standing or is_idle):
            self._answer()

    @property
    def is_held_up(self) -> bool:
        """Something runs that can't stand still."""
        return self._unstoppable > 0

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """On the loop, around work that is no job: the gate answers when somebody stands for it in `breathe`."""
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            self.look()

    @contextlib.asynccontextmanager
    async def unstoppable(self) -> AsyncIterator[None]:
        """On the loop, around what can't stand still: it begins with the gate open, which then waits for its end."""
        await self.opened()
        self._hold_up(1)
        try:
            yield
        finally:
            self._hold_up(-1)
            self.look()

    def _hold_up(self, more: int) -> None:
        with self._changed:
            self._unstoppable += more
            self._changed.notify_all()

    async def opened(self) -> None:
        """Wait before the start of a job; also the place between two steps for work that lives on the loop."""
        self._waiting += 1
        try:
            while not self.is_open:
                self.look()
                await asyncio.sleep(0.01)
        finally:
            self._waiting -= 1

    def breathe(self) -> None:
        """From the working thread, between two steps: stand still while a window is open."""
        if self._loop is None or self.is_open:
            return
        begun = self._clock()
        with self._changed:
            self.standing += 1
            self._loop.call_soon_threadsafe(self.look)
            # What can't stand still may need this very thread to end.
            while not self._unstoppable and not self._pauses.is_open(self._clock()):
                self._changed.wait(self._pauses.left_s(self._clock()))
            self.standing -= 1
        self.held_s += self._clock() - begun

    def _answer(self) -> None:
        with self._changed:
            answers = self._pauses.to_answer(is_idle=not (self.standing or self._at_work or self._waiting))
        for answer in answers:
            self._send(answer)


class Window(msgspec.Struct, frozen=True):
    """What a bench got: `until` on its own clock, and who did not answer."""

    until: float
    waited_s: float = 0.0
    missing: tuple[str, ...] = ()


class QuietWindows:
    """A bench's way to quiet windows on one resource; one at a time."""

    def __init__(self, resource: str, clock: Callable[[], float], send: Send) -> None:
        self.resource = resource
        self._clock, self._send = clock, send
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Future[msg.QuietGrant]] = {}

    def handle(self, grant: msg.QuietGrant) -> None:
        future = self._waiting.get(grant.request_id)
        if future is None:
            self._send(msg.QuietDone(grant.request_id))  # nobody waits for it any more
        elif not future.done():
            future.set_result(grant)

    @contextlib.contextmanager
    def open(self, length_s: float, wait_s: float = 30.0) -> Iterator[Window]:
        """From a working thread: a window of at most `length_s`. `InfraError` where none comes within `wait_s`."""
        request = msg.QuietRequest(secrets.token_hex(8), self.resource, length_s)
        asking = asyncio.run_coroutine_threadsafe(self._ask(request, wait_s), self._loop)
        try:
            grant = asking.result(wait_s + 5.0)
            yield Window(self._clock() + grant.length_s, grant.waited_s, tuple(grant.missing))
        except TimeoutError as error:
            asking.cancel()
            cause = f"no quiet window on {self.resource} within {wait_s:g} s"
            raise InfraError(cause, "Give the bench a GPU of its own, or raise the wait") from error
        finally:
            self._loop.call_soon_threadsafe(self._done, request)

    @contextlib.contextmanager
    def insist(self, length_s: float) -> Iterator[Window]:
        """As `open`, and once more where somebody was missing: a load of weights, say, is over by then."""
        with self.open(length_s) as window:
            if not window.missing:
                yield window
                return
        with self.open(length_s) as window:
            yield window

    async def _ask(self, request: msg.QuietRequest, wait_s: float) -> msg.QuietGrant:
        future = self._waiting[request.request_id] = self._loop.create_future()
        async with asyncio.timeout(wait_s):
            while True:
                self._send(request)
                await asyncio.wait({future}, timeout=REPEAT_S)
                if future.done():
                    grant: msg.QuietGrant = future.result()
                    return grant

    def _done(self, request: msg.QuietRequest) -> None:
        self._waiting.pop(request.request_id, None)
        self._send(msg.QuietDone(request.request_id))
