"""`kbrl chaos`: faults by a plan, done to a run of this host; then its counters are checked.

Either to a run that goes on (`kbrl chaos RUN …`), or to one of its own (`kbrl chaos --train key=value …`), which may
then also lose its nannies and its network: it is started behind a proxy, and continued when it has ended too early.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from kbrl_async.cli import preflight
from kbrl_async.cli.launch import undone_at_signals
from kbrl_async.cli.shared import add_old_run, add_settings, completed, print_json, resolve, run_of, runs_and_settings
from kbrl_async.durable import write_atomically
from kbrl_async.errors import RunError, UserError
from kbrl_async.lab.chaos.checks import BROKER_BACK_S, FILE, ChaosReport, gather, judge, render
from kbrl_async.lab.chaos.driver import FaultDriver, Happened
from kbrl_async.lab.chaos.faults import LINKED, FaultKind, PlannedFault, RandomOptions, random_plan, read_plan
from kbrl_async.lab.chaos.injuries import Injuries
from kbrl_async.lab.chaos.link import Link
from kbrl_async.lab.chaos.processes import census
from kbrl_async.runs.config import BEHIND, behind, endpoints
from kbrl_async.runs.folder import LATEST, is_finished, load_run, plan, prepare
from kbrl_async.runs.status_client import StatusClient, of_run
from protocols.messages import StatusReport

STEP_S = 0.05
ASK_S = 0.3
END_S = 60.0
"""How long the processes of a run may take to be gone after its summary."""
OUTPUT = "chaos-train.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is done")
    what.add_argument("--plan", metavar="FILE", type=Path, help="TOML or YAML: see docs/chaos.md")
    what.add_argument("--random", metavar="N", type=int, help="N faults drawn from a seed, in place of a plan")
    what.add_argument("--seed", metavar="S", type=int, default=0, help="the same seed gives the same plan; default 0")
    what.add_argument("--faults", metavar="KIND,…", help=f"kinds to draw from: {', '.join(FaultKind)}; default: all")
    what.add_argument("--every", metavar="S", type=float, default=4.0, help="mean seconds between faults; default 4")
    what.add_argument("--dry-run", action="store_true", help="print the plan as JSON, do nothing")
    whom = parser.add_argument_group("to whom")
    whom.add_argument("--train", action="store_true", help="start a run of its own, with the settings that follow")
    end = parser.add_argument_group("at the end")
    end.add_argument("--broker-back", metavar="S", type=float, default=BROKER_BACK_S, help="limit; default 3 seconds")
    end.add_argument("--json", action="store_true", help="print the report as JSON")
    add_old_run(parser)
    words = add_settings(parser, "RUN|key=value", "the run that is harmed (default: the newest); settings of --train")
    completed(words, runs_and_settings)


def run(args: argparse.Namespace) -> int:
    named = [word for word in args.overrides if "=" not in word]
    args.overrides = [word for word in args.overrides if word not in named]
    if len(named) > 1:
        raise UserError(f"one run at a time, not {named[0]} and {named[1]}", "Settings are written key=value")
    args.run_folder = next(iter(named), LATEST)
    faults = chosen(args)
    if args.dry_run:
        print_json(faults, pretty=True)
        return 0
    with undone_at_signals():
        report = _own_run(args, faults) if args.train else on_running(args, faults)
    if args.json:
        print_json(report, pretty=True)
    else:
        Console().print(render(report))
    return 0 if report.ok else RunError.exit_code


def chosen(args: argparse.Namespace) -> list[PlannedFault]:
    """The plan that the arguments ask for.

    :raises UserError: neither or both of a plan and a random one, or one that this run can't have.
    """
    if (args.plan is None) == (args.random is None):
        raise UserError("what shall be done?", "Give --plan FILE, or --random N")
    if args.overrides and not args.train:
        raise UserError(f"'{args.overrides[0]}' is a setting, and no run is started", "Add --train, or leave it out")
    if args.plan is not None:
        faults = read_plan(args.plan)
    else:
        if args.random < 1 or args.every <= 0:
            raise UserError("a random plan needs a count and a mean time above 0", "Give --random 20 --every 4")
        faults = random_plan(RandomOptions(args.random, args.seed, _kinds(args), args.every, args.train))
    odd = [fault for fault in faults if fault.kind in LINKED or fault.ends_run]
    if odd and not args.train:
        raise UserError(
            f"{odd[0].kind} of {odd[0].target} can't be done to a run that was started without it",
            "Let kbrl chaos start the run: --train",
        )
    return faults


def _kinds(args: argparse.Namespace) -> tuple[FaultKind, ...]:
    if args.faults is None:
        return tuple(kind for kind in FaultKind if args.train or kind not in LINKED)
    try:
        return tuple(FaultKind(word) for word in args.faults.split(","))
    except ValueError as error:
        raise UserError(str(error), f"There are {', '.join(FaultKind)}") from None


# ── a run that goes on ──────────────────────────────────────────────────────────────────────────────────────────────


def on_running(args: argparse.Namespace, faults: list[PlannedFault]) -> ChaosReport:
    run_dir = run_of(args)
    if is_finished(run_dir) or not census(run_dir):
        raise UserError(f"{run_dir} is not running here", "Start it, or let kbrl chaos start one: --train")
    report = ChaosReport(run_dir.name, args.seed if args.random else None)
    injuries = Injuries(run_dir, _sockets(run_dir), random.Random(args.seed))
    with _driver(run_dir, faults, injuries) as driver:
        _watch(run_dir, driver, report, lambda: bool(census(run_dir)), lambda: False)
    return _concluded(run_dir, report, args)


# ── a run of its own ────────────────────────────────────────────────────────────────────────────────────────────────


def _own_run(args: argparse.Namespace, faults: list[PlannedFault]) -> ChaosReport:
    config = resolve(args)
    preflight.check(plan(config))
    run_dir = prepare(config).path.resolve()
    report = ChaosReport(run_dir.name, args.seed if args.random else None)
    allowed = 1 + sum(fault.ends_run for fault in faults)
    sockets = _sockets(run_dir)
    with contextlib.ExitStack() as stack:
        link = None
        if pairs := _pairs(sockets):
            link = stack.enter_context(Link(pairs))
        elif any(fault.kind in LINKED for fault in faults):
            raise UserError("the broker of this run does not use socket files", "Leave out delay and partition")
        process = stack.enter_context(_Training(run_dir, behind=link is not None))
        injuries = Injuries(run_dir, sockets, random.Random(args.seed), link)
        driver = stack.enter_context(_driver(run_dir, faults, injuries))

        def again() -> bool:
            """Continue a run that ended too early, as often as the plan ends it."""
            if is_finished(run_dir) or report.starts >= allowed + 1:
                return False
            report.starts += 1
            driver.rest()
            process.start()
            return True

        _watch(run_dir, driver, report, process.is_alive, again)
    return _concluded(run_dir, report, args)


class _Training:
    """`kbrl train resume=RUN` with its output in the run's folder; stopped, with all its processes, at the end."""

    def __init__(self, run_dir: Path, *, behind: bool) -> None:
        self._run_dir = run_dir
        self._environment = {**os.environ, **({BEHIND: "1"} if behind else {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Training:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def start(self) -> None:
        command = [sys.executable, "-m", "kbrl_async", "train", f"resume={self._run_dir}"]
        with (self._run_dir / "logs" / OUTPUT).open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sockets(run_dir: Path) -> dict[str, str]:
    found = endpoints(load_run(run_dir), run_dir)
    return {"submit": found.submit, "work": found.work}


def _pairs(sockets: dict[str, str]) -> list[tuple[Path, Path]]:
    """Socket files and those behind them; none where the broker is reached otherwise."""
    if not all(address.startswith("ipc://") for address in sockets.values()):
        return []
    pairs = []
    for address in sockets.values():
        front, back = (Path(name.removeprefix("ipc://")) for name in (address, behind(address)))
        front.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        pairs.append((front, back))
    return pairs


@contextlib.contextmanager
def _driver(run_dir: Path, faults: list[PlannedFault], injuries: Injuries) -> Iterator[FaultDriver]:
    address, keys = of_run(run_dir)
    with StatusClient(address, keys) as client:

        def ask() -> StatusReport | None:
            return client.ask(ASK_S)

        driver = FaultDriver(faults, injuries, ask, time.monotonic, _say)
        try:
            yield driver
        finally:
            driver.finish()


def _say(happened: Happened) -> None:
    fault = happened.fault
    length = f" for {fault.for_s:g} s" if fault.for_s else ""
    note = f" ({happened.note})" if happened.note else ""
    print(f"{happened.began_s:8.1f} s  {fault.kind} {fault.target}{length}{note}", file=sys.stderr, flush=True)


def _watch(
    run_dir: Path, driver: FaultDriver, report: ChaosReport, is_alive: Callable[[], bool], again: Callable[[], bool]
) -> None:
    """Until the run has ended, or stands still."""
    report.faults = driver.happened
    _save(run_dir, report)
    began = time.monotonic()
    while True:
        driver.step()
        if not is_alive() and not again():
            break
        if driver.stands_still:
            print("the run stands still", file=sys.stderr)
            break
        time.sleep(STEP_S)
    driver.finish()
    report.took_s = round(time.monotonic() - began, 1)


def _concluded(run_dir: Path, report: ChaosReport, args: argparse.Namespace) -> ChaosReport:
    until = time.monotonic() + END_S
    while (left := census(run_dir)) and time.monotonic() < until:
        time.sleep(0.2)
    evidence = gather(run_dir)
    evidence.left = [f"{process.instance} ({process.role}, pid {process.pid})" for process in left]
    report.conclude(judge(evidence), args.broker_back)
    _save(run_dir, report)
    return report


def _save(run_dir: Path, report: ChaosReport) -> None:
    write_atomically(run_dir / FILE, msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
