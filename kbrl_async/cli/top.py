"""`kbrl top`: a running system on the terminal, live. It reads only: the broker's status socket takes nothing else.

::

    broker ─ StatusReport ─▶ Watcher.look ─▶ View ─▶ screen | JSON        once an interval
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from kbrl_async.cli.shared import add_run, find, print_json
from kbrl_async.errors import RunError, UserError
from kbrl_async.keyring import client_keys
from kbrl_async.runs.config import process_counts
from kbrl_async.runs.folder import is_finished, load_run
from kbrl_async.runs.status_client import StatusClient, of_run
from kbrl_async.runs.telemetry import progress
from kbrl_async.runs.telemetry.live import View, view
from kbrl_async.runs.telemetry.log_reading import LastErrors
from kbrl_async.runs.telemetry.progress import Progress
from kbrl_async.runs.telemetry.screen import render
from protocols.messages import StatusReport, TroubleReport

PATIENCE_S = 2.0
"""How long an answer may take before the broker counts as away."""
OVER = ("ended", "stopped")
MAX_CORE_SHARE = 0.03
"""Of a core, for a viewer; where a picture costs more, it comes less often."""
WINDOW_S = 10.0
"""What workers do a second is over this time, so that it is calm."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--connect", metavar="ADDRESS", help="a broker's status address, such as tcp://host:5757")
    parser.add_argument("--keys", metavar="FOLDER", help="issued/observer/NAME of the broker's keys, for other hosts")
    parser.add_argument("--once", action="store_true", help="show it once and end; exit code 4 where nobody answers")
    parser.add_argument("--json", action="store_true", help="as JSON, one line each time")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks; default 1")


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600:
        raise UserError(f"--interval {args.interval:g} is out of range", "Give seconds from 0.1 to 3600")
    run_dir = None if args.connect else find(args.run_folder)
    address, keys = of_run(run_dir) if run_dir else (args.connect, None)
    if args.keys:
        keys = client_keys(args.keys)
    with (
        StatusClient(address, keys) as client,
        contextlib.closing(Watcher(client.ask, run_dir, name=args.connect or "")) as watcher,
    ):
        try:
            return _once(watcher, args) if args.once else watch_until_the_end(watcher, args)
        except KeyboardInterrupt:
            return 0  # how one leaves


class Watcher:
    """Looks once an interval and remembers what it needs for rates, and for saying how things stood."""

    def __init__(
        self,
        ask: Callable[[float], StatusReport | None],
        run_dir: Path | None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run_dir`: the run's folder, where it is on this host; its logs and its end are seen there."""
        self._ask = ask
        self._run_dir = run_dir
        self._name = name or (run_dir.name if run_dir else "")
        self._clock = clock
        self._seen: deque[StatusReport] = deque()
        self._answered_at = clock()
        self._errors = LastErrors(run_dir / "logs") if run_dir else None
        self._expected = [s for s in process_counts(load_run(run_dir)) if s != "broker"] if run_dir else []

    def look(self, timeout_s: float = PATIENCE_S) -> View:
        report = self._ask(timeout_s)
        now = self._clock()
        if report is not None:
            self._answered_at = now
            self._remember(report)
            return view(self._seen[0], report, self._logged(), 0.0, self._progress(), self._expected)
        away_s = max(0.001, now - self._answered_at)
        last = self._seen[-1] if self._seen else StatusReport(run=self._name)
        seen = view(None, last, self._logged(), away_s)
        return msgspec.structs.replace(seen, state=self._end(last) or seen.state)

    def close(self) -> None:
        if self._errors is not None:
            self._errors.close()

    def _remember(self, report: StatusReport) -> None:
        if self._seen and report.epoch != self._seen[-1].epoch:
            self._seen.clear()
        self._seen.append(report)
        while len(self._seen) > 2 and report.at - self._seen[1].at >= WINDOW_S:
            self._seen.popleft()

    def _end(self, last: StatusReport) -> str:
        """How it ended, empty where it has not: a broker that was draining will not come back by itself."""
        if self._run_dir is not None and is_finished(self._run_dir):
            return "ended"
        return "stopped" if last.draining else ""

    def _progress(self) -> Progress | None:
        return progress.read(self._run_dir) if self._run_dir is not None else None

    def _logged(self) -> list[TroubleReport]:
        return self._errors.look() if self._errors else []


def _once(watcher: Watcher, args: argparse.Namespace) -> int:
    seen = watcher.look()
    if seen.state == "running":
        time.sleep(min(args.interval, 1.0))
        seen = watcher.look()
    if seen.state == "away":
        cure = "Is the run going on? Its address is in its config.yaml under broker.status"
        raise RunError(f"no broker answers for {seen.run or 'this run'}", cure)
    _show_plainly(seen, as_json=args.json)
    return 0


def _show_plainly(seen: View, *, as_json: bool) -> None:
    if as_json:
        print_json(seen)
        sys.stdout.flush()
        return
    console = Console()
    if seen.stages:
        console.print(render(seen, console.width, max(24, console.height)))
    if seen.state in OVER:
        console.print(last_words(seen), soft_wrap=True)


def last_words(seen: View) -> str:
    run = seen.run or "the run"
    if seen.state == "stopped":
        return f"{run} has ended or was stopped; 'kbrl train resume=runs/{run}' goes on with one that was stopped"
    return f"{run} has ended; its result: kbrl summary {run}"


def watch_until_the_end(watcher: Watcher, args: argparse.Namespace) -> int:
    views = views_until_the_end(watcher, args.interval)
    if args.json or not sys.stdout.isatty():
        for seen in views:
            _show_plainly(seen, as_json=args.json)
        return 0
    console = Console()
    seen = View(run="", state="away")
    # one whole frame at a time on the alternate screen: nothing scrolls, nothing flickers, the shell is as it was
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for seen in views:
            live.update(render(seen, console.width, console.height), refresh=True)
    _show_plainly(seen, as_json=False)
    return 0


def views_until_the_end(watcher: Watcher, interval_s: float) -> Iterator[View]:
    """Until the run has ended; the last view says so."""
    while True:
        begun, spent = time.monotonic(), time.process_time()
        seen = watcher.look()
        yield seen
        if seen.state in OVER:
            return
        time.sleep(pause(interval_s, time.monotonic() - begun, time.process_time() - spent))


def pause(interval_s: float, elapsed_s: float, cpu_s: float) -> float:
    """Until the next look: what is left of the interval, and at least so long that the share of a core holds."""
    return max(0.0, interval_s - elapsed_s, cpu_s / MAX_CORE_SHARE - elapsed_s)
