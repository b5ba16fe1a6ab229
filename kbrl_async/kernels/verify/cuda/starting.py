"""How a process on a GPU starts, seen by who asked for it: until it says `Confined`, only our own code has run there,
and in one that records or replays until its first candidate comes.

::

    spawned ─▶ CUDA context ─▶ seccomp ─▶ `Confined` ─▶ shared memory is mapped ─▶ `Ready`
                  └ `Failed`, or its end ─▶ `NotStarted`: another one is tried
                                         ─▶ `NoRoom`: no memory for its context, which is waited for

So what it says of its end can be believed, unlike whatever it says later, and nothing of it is a candidate's fault.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Child
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import replies, wire
from kbrl_async.kernels.verify.hoarding import NoMemory

CONFINED_S = 30.0
TRIES = 3
CURE = "Run `nvidia-smi`, and `kbrl verify` with one problem, to see whether this host's GPU works in a sandbox"
_END_S = 5.0
"""From the end of its socket to its own: the driver takes its context down in between."""
_MOST_TEXT = 300
_Started = TypeVar("_Started")
_Said = TypeVar("_Said", bound=wire.Reply)


class NotStarted(InfraError):  # noqa: N818 - an answer as long as another one can be tried
    """A process that had met no candidate has ended, or is not ready in time."""


class NoRoom(NotStarted, NoMemory):
    """The GPU had no memory for it."""


def confined(child: Child, what: str) -> wire.Confined:
    """What it says first.

    :raises NotStarted: it says something else, or nothing.
    """
    return receive(wire.Confined, child, what, CONFINED_S)


def receive(kind: type[_Said], child: Child, what: str, within_s: float) -> _Said:
    """What it says next, before it has met any candidate.

    :raises NotStarted: it says something else, or nothing.
    """
    if not DeviceTurns.answers(child.channel, within_s, None):  # making a context disturbs nobody who times
        raise failed(what, f"it was not ready after {within_s:.0f} s")
    data = b""
    with contextlib.suppress(ConnectionError):
        data = child.channel.recv(wire.MAX_REPLY)
    if not data:
        raise failed(what, child.ending(_END_S))
    try:
        found = replies.read(data)
    except replies.Malformed as error:
        raise failed(what, f"it said what no process of ours says ({error})") from error
    if isinstance(found, kind):
        return found
    if not isinstance(found, wire.Failed):
        raise failed(what, "it said something else first")
    raise failed(what, found.text, found.kind == "out_of_memory")


def failed(what: str, why: str, is_short: bool = False) -> NotStarted:
    """`is_short`: of memory."""
    why = " ".join(why.split())
    if is_short:
        return NoRoom(f"the GPU has no memory for {what} ({why})"[:_MOST_TEXT], "Other processes hold it: `nvidia-smi`")
    return NotStarted(f"{what} did not start in its sandbox: {why}"[:_MOST_TEXT], CURE)


def first_that_starts(start: Callable[[], _Started]) -> _Started:
    """What `start` gives; where it fails soon, what it gives the next time. Memory is found by who waits for it, and
    not by another try at once; on a host that is too slow or hangs, another bench is the better try.

    :raises InfraError: that of the last one.
    """
    end = time.monotonic() + CONFINED_S
    for _ in range(TRIES - 1):
        try:
            return start()
        except NoMemory:
            raise
        except InfraError:
            if time.monotonic() > end:
                raise
    return start()
