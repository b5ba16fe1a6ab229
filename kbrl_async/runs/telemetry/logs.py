"""Structured logs: one JSON line per event in the run folder, one short readable line on the terminal.

Invariants
* A line is one `write` to a file opened for appending: no line is lost or torn by `kill -9`, and the several processes
  of a service (a nanny and its child) share one file.
* Values whose key names a secret never leave the process.
* `task_id`, `group_id` and `policy_version` bound by `bound` appear in every line below it, also across `await`.

::

    log = get_logger()
    with bound(task_id="g000012.r3.t0"):
        log.info("compiled", cached=True)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any

import msgspec
import structlog
from structlog.contextvars import bind_contextvars, bound_contextvars, clear_contextvars

Event = MutableMapping[str, Any]

REDACTED = "***"
MAX_BYTES = 64 << 20
"""Of one service's log; twice that with the part that is set aside."""
_SECRET = re.compile(
    r"(^|[._-])(api_?key|key|token|secret|password|passwd|passphrase|credentials?|authorization)$", re.I
)
_HIDDEN_ON_TERMINAL = ("process", "pid", "timestamp")
STATUS_LINE = "KBRL_STATUS_LINE"
"""Variable that says: a launcher shows our lines on a terminal, above a line of its own that says how things stand."""
SHOWN = "shown"
"""Key of an event's words for such a terminal. Of what is usual it shows only events that have some; those with empty
words are on no terminal."""
OF_THE_RUN = "» "
"""Such a line begins with it: it is about the run, not about the process that says it."""

bound = bound_contextvars
"""Context manager: `with bound(task_id=…, group_id=…, policy_version=…):`."""
bind = bind_contextvars
"""Bind for the rest of this task or process."""


def get_logger(**values: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger; `values` are in each of its lines."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(**values)
    return logger


def configure(process_name: str, run_dir: Path | None, level: str = "info", *, terminal: bool = True) -> None:
    """Send this process's log to `run_dir/logs/<process_name>.jsonl` and, if asked, to stderr.

    Python's own `logging` and `warnings` arrive there too. Call it again after a fork to a new process name.
    """
    is_brief = bool(os.environ.get(STATUS_LINE)) and _level_number(level) >= logging.INFO
    stream = LogFile(run_dir / "logs" / f"{process_name}.jsonl") if run_dir else None
    clear_contextvars()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
            redact,
            _Sinks(process_name, stream, sys.stderr if terminal else None, is_brief=is_brief),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_level_number(level)),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    _adopt_stdlib(level)


def _level_number(name: str) -> int:
    return logging.getLevelNamesMapping()[name.upper()]


class LogFile:
    """A file that several processes append whole lines to; closed when it is no longer used.

    A full one is set aside as `NAME.jsonl.1`, and the one before is dropped (I10); who still writes to it notices.
    """

    _fd = -1

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._max_bytes = path, max_bytes
        self._unlooked = 0
        self._open()

    def _open(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def fileno(self) -> int:
        return self._fd

    def write(self, line: bytes) -> None:
        try:
            os.write(self._fd, line)
            self._unlooked += len(line)
            if self._unlooked > self._max_bytes // 64:
                self._unlooked = 0
                self._make_room()
        except OSError as error:
            # a full disk must not turn a log line into a failed task
            print(f"log line not written: {error.strerror}", file=sys.stderr)

    def _make_room(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # or two would set aside, one of them the new file
        try:
            self._set_aside()
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _set_aside(self) -> None:
        mine = os.fstat(self._fd)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(mine, self._path.stat()):
                if mine.st_size <= self._max_bytes:
                    return
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        self._open()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            close(descriptor)  # at the interpreter's end the module's own names may be gone


def redact(_logger: object, _method: str, event: Event) -> Event:
    """Processor: blank the values of keys that name a secret, at any depth of mappings and lists."""
    return {key: _redacted(key, value) for key, value in event.items()}


def _redacted(key: str, value: Any) -> Any:
    if _SECRET.search(key):
        return REDACTED
    if isinstance(value, Mapping):
        return {name: _redacted(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted("", item) for item in value]
    return value


class _Sinks:
    """Last processor: writes the event to both places and drops it."""

    def __init__(
        self, process: str, stream: LogFile | None, terminal: IO[str] | None, *, is_brief: bool = False
    ) -> None:
        self._process = process
        self._stream = stream
        self._terminal = terminal
        self._is_brief = is_brief
        self._plain_traceback = structlog.processors.ExceptionRenderer()
        self._readable = structlog.dev.ConsoleRenderer(
            colors=wants_colour(terminal), pad_event_to=0, pad_level=False, sort_keys=False
        )

    def __call__(self, logger: Any, method: str, event: Event) -> str:
        words = event.pop(SHOWN, None)
        event = self._plain_traceback(logger, method, event)
        if self._stream is not None:
            self._stream.write(_json_line({"process": self._process, "pid": os.getpid(), **event}))
        if self._terminal is not None:
            self._show(logger, method, event, words)
        raise structlog.DropEvent

    def _show(self, logger: Any, method: str, event: Event, words: str | None) -> None:
        if self._is_brief and words:
            print(f"{OF_THE_RUN}{words}", file=self._terminal, flush=True)
        elif words != "" and not (self._is_brief and event["level"] == "info"):
            shown = {key: value for key, value in event.items() if key not in _HIDDEN_ON_TERMINAL}
            print(self._readable(logger, method, shown), file=self._terminal, flush=True)


def _json_line(event: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(event, enc_hook=str) + b"\n"
    except (TypeError, UnicodeEncodeError):
        # odd mapping keys, or the half characters of a broken candidate
        return json.dumps(event, default=str, skipkeys=True).encode() + b"\n"


def wants_colour(stream: IO[str] | None) -> bool:
    """Colours on a terminal, or where the environment forces them (the runner's pipe to a terminal); NO_COLOR wins."""
    if stream is None or os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


class _ToStructlog(logging.Handler):
    """Hands what libraries log to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        log: Callable[..., Any] = getattr(get_logger(), _level_name(record.levelno))
        log(record.getMessage(), logger=record.name, exc_info=record.exc_info or None)


def _level_name(number: int) -> str:
    return next(
        name for bound_, name in ((40, "error"), (30, "warning"), (20, "info"), (0, "debug")) if number >= bound_
    )


def _adopt_stdlib(level: str) -> None:
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())
    # libraries are chatty below warning, and theirs is not our level
    root.setLevel(max(logging.WARNING, _level_number(level)))
    logging.captureWarnings(True)
