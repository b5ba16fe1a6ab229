"""What sanitizing is asked, what it has seen, and what it found: without torch, which a farm needs only in children."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from kbrl_async.kernels.backends.sanitize.reports import SanitizerFinding

if TYPE_CHECKING:
    from kbrl_async.kernels.backends.building.context import BuildContext

CALLS_FILE = "calls.json"
_MOST = 1 << 63


class SanitizeTask(msgspec.Struct, frozen=True):
    """What a recording child or a watched process is started with."""

    problem: str
    candidate: str
    artifacts: dict[str, str]
    folder: str
    device: str = "cpu"
    seed: int = 0
    max_calls: int = 64
    max_bytes: int = 256 << 20
    backend: str = ""


class Argument(msgspec.Struct, frozen=True):
    """`buffer` ≥ 0: a pointer `offset` bytes into that buffer of the call; else the number `value`."""

    declared: str
    buffer: int = -1
    offset: int = 0
    value: float | int = 0


class RecordedLaunch(msgspec.Struct, frozen=True):
    """One launch. `buffers` are the sizes in bytes; their contents lie in `call-{index}-{buffer}.bin`."""

    index: int
    source_key: str
    name: str
    arguments: list[Argument]
    buffers: list[int]


class RecordedLaunches(msgspec.Struct, frozen=True):
    calls: list[RecordedLaunch]
    left_out: int = 0
    """Calls beyond the limits."""
    error: str = ""
    """Why the model ended early, where it did."""


def read(data: bytes) -> RecordedLaunches | None:
    """None for what no recorder writes: the candidate ran beside it. Names and numbers become a C program's."""
    try:
        found = msgspec.json.decode(data, type=RecordedLaunches)
    except Exception:  # the decoder, too, raises what it likes: RecursionError, UnicodeDecodeError
        return None
    return (
        found
        if [call.index for call in found.calls] == [*range(len(found.calls))] and all(map(_is_plain, found.calls))
        else None
    )


def _is_plain(call: RecordedLaunch) -> bool:
    numbers = [*call.buffers, *(argument.offset for argument in call.arguments)]
    values = [argument.value for argument in call.arguments if isinstance(argument.value, int)]
    return (
        call.name.isidentifier()
        and call.name.isascii()
        and all(0 <= number < _MOST for number in numbers)
        and all(-_MOST <= value < 2 * _MOST for value in values)
        and all(-1 <= argument.buffer < len(call.buffers) for argument in call.arguments)
    )


def buffer_file(call: int, buffer: int) -> str:
    return f"call-{call}-{buffer}.bin"


class Sanitized(msgspec.Struct, frozen=True):
    findings: tuple[SanitizerFinding, ...] = ()
    ran: tuple[str, ...] = ()
    """Tools that came to an end."""
    not_run: str = ""
    """Why a tool could not say anything, or not about everything."""
    seconds: float = 0.0


class Sanitizes(Protocol):
    """What a backend's own way is given."""

    @property
    def context(self) -> BuildContext: ...

    @property
    def deadline_s(self) -> float:
        """Seconds for one program."""

    def record(self, task: SanitizeTask, folder: Path) -> RecordedLaunches:
        """The kernel calls of one forward; what came before a crash, where it crashes."""
