"""`kbrl logs`: what all processes of a run have logged, as one stream by time; followed while the run goes on."""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kbrl_async.cli.shared import add_run, find
from kbrl_async.errors import UserError
from kbrl_async.runs.folder import is_finished
from kbrl_async.runs.telemetry.log_reading import (
    LEVELS,
    Broken,
    Filter,
    Follower,
    LoggedEvent,
    files,
    merged,
    printable,
    whole_size,
)
from kbrl_async.runs.telemetry.logs import wants_colour

POLL_S = 0.25
FIRST_LINES = 20
"""Shown before following, unless --lines or --since says otherwise."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HIDDEN = ("process", "pid", "timestamp", "level", "event", "exception", "stack")
_COLOURS = (36, 35, 34, 32, 33, 96, 95, 94, 92)
_LEVEL_COLOURS = {"debug": 90, "warning": 33, "error": 31, "critical": 31}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is written, until the run ends")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="the last N lines only (of those that are wanted)")
    for name, words in (
        ("task", "task, such as g000012.r3.t0; what it begins with is enough: g000012.r3"),
        ("rollout", "rollout, such as g000012.r3"),
        ("group", "group or batch, such as g000012 or batch-000003"),
        ("process", "process, such as learner.1, or learner for all of a kind"),
        ("worker", "the same as --process"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], metavar=name.upper(), help=words)
    parser.add_argument("--level", choices=LEVELS, default="debug", help="least important level that is shown")
    parser.add_argument("--since", default="", metavar="WHEN", help="10m, 2h, 14:05, 2026-01-31T14:05 (local time)")
    parser.add_argument("--until", default="", metavar="WHEN", help="the same, for the end")
    parser.add_argument("--json", action="store_true", help="the JSON lines as they were written")


def run(args: argparse.Namespace) -> int:
    run_dir = find(args.run_folder)
    folder = run_dir / "logs"
    if not folder.is_dir():
        raise UserError(f"{run_dir} has no logs", "Give the folder of a run, such as runs/default")
    now = time.time()
    wanted = Filter(
        tasks=(*args.task, *args.rollout, *args.group),
        processes=(*args.process, *args.worker),
        level=LEVELS[args.level],
        since=moment(args.since, now),
        until=moment(args.until, now),
    )
    broken = Broken()
    sizes = {path: whole_size(path) for path in files(folder)} if args.follow else {}
    found = (line for line in merged(files(folder), broken, sizes) if wanted.wants(line))
    count = args.lines if args.lines is not None else FIRST_LINES if args.follow and not args.since else None
    try:
        show = LinePrinter(wants_colour(sys.stdout))
        _print(found if count is None else deque(found, maxlen=max(0, count)), args.json, show)
        sys.stdout.flush()
        if args.follow:
            _print(followed(run_dir, sizes, broken, wanted), args.json, show, at_once=True)
    except KeyboardInterrupt:
        pass  # how one leaves
    if broken.count:
        print(f"{broken.count} lines were no JSON and are left out", file=sys.stderr)
    return 0


def followed(run_dir: Path, sizes: dict[Path, int], broken: Broken, wanted: Filter) -> Iterator[LoggedEvent]:
    """What is written from now on; ends once the run has ended and its last lines are read."""
    follower = Follower(run_dir / "logs", sizes, broken)
    try:
        while True:
            has_ended = is_finished(run_dir)
            new = follower.new()
            yield from (line for line in new if wanted.wants(line))
            if has_ended and not new:
                return
            time.sleep(POLL_S)
    finally:
        follower.close()


def _print(found: Iterable[LoggedEvent], as_json: bool, show: LinePrinter, *, at_once: bool = False) -> None:
    """JSON goes through as it is; the rest of this command prints nothing to stdout."""
    for line in found:
        text = line.raw if as_json else show.line(line).encode("utf-8", "replace")
        sys.stdout.buffer.write(text + b"\n")
        if at_once:
            sys.stdout.buffer.flush()


class LinePrinter:
    """A line for people: local time, process, level, event, the rest as key=value."""

    def __init__(self, colours: bool) -> None:
        self._colours = colours
        self._of: dict[str, int] = {}
        self._width = 19

    def line(self, line: LoggedEvent) -> str:
        event = line.event
        process, level = printable(str(event.get("process", "?"))), printable(str(event.get("level", "info")))
        self._width = min(24, max(self._width, len(process)))
        colour = self._of.setdefault(process, _COLOURS[len(self._of) % len(_COLOURS)])
        text = " ".join(
            [
                self._paint(local_time(line.at), 90),
                self._paint(process.ljust(self._width), colour),
                self._paint(f"{level:<7}", _LEVEL_COLOURS.get(level, 0)),
                self._paint(printable(str(event.get("event", ""))), 1),
                *(f"{self._paint(f'{printable(k)}=', 90)}{short(v)}" for k, v in event.items() if k not in _HIDDEN),
            ]
        )
        details = event.get("exception") or event.get("stack")
        return f"{text}\n{_indented(str(details))}" if details else text

    def _paint(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours and colour else text


def short(value: Any) -> str:
    text = printable(str(value))
    return f"'{text}'" if " " in text and isinstance(value, str) else text


def _indented(text: str) -> str:
    return "\n".join("    " + printable(row.replace("\t", "    ")) for row in text.splitlines())


def local_time(at: str) -> str:
    """`14:05:09.123` of an ISO time in UTC; the text itself where it is none."""
    try:
        found = datetime.datetime.fromisoformat(at)
    except ValueError:
        return at[:12].ljust(12)
    return found.astimezone().strftime("%H:%M:%S.%f")[:-3]


def moment(text: str, now: float) -> str:
    """`10m` (ago), a time of today, or a date and time, as the ISO time in UTC that logs carry; empty stays empty.

    :raises UserError: none of these.
    """
    if not text:
        return ""
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        at = datetime.datetime.fromtimestamp(now - float(ago[1]) * _UNITS[ago[2]], datetime.UTC)
    else:
        try:
            at = _parsed(text, now).astimezone(datetime.UTC)
        except ValueError:
            raise UserError(f"'{text}' is no time", "Write 10m, 2h, 14:05 or 2026-01-31T14:05") from None
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _parsed(text: str, now: float) -> datetime.datetime:
    today = datetime.datetime.fromtimestamp(now).astimezone()
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?", text):
        clock = datetime.time.fromisoformat(text.zfill(5) if text.count(":") == 1 else text)
        return datetime.datetime.combine(today.date(), clock).astimezone()
    return datetime.datetime.fromisoformat(text)
