"""What benchmarks share: sub-commands made of functions, where they ran, and the parts of ours that they start.

::

    commands = Commands("broker", __doc__)


    @commands
    def connections(seconds: Annotated[float, "of each measurement"] = 5.0) -> Result:
        \"\"\"Tasks a second.\"\"\"

    if __name__ == "__main__":
        commands.main()

`python -m benchmarks.broker connections --seconds 5` calls it. What it returns is printed last, as one line of JSON,
with where it ran beside it; progress goes to stderr. The exit code is 1 where `ok` is false.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import multiprocessing as mp
import os
import platform
import signal
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from kbrl_async.errors import KbrlError
from kbrl_async.runs.archive.archive import ArchiveReader, TurnRow, UpdateRow
from protocols.ledger import LedgerOptions, StageOptions
from services.broker.options import BrokerOptions
from services.runtime.addresses import addresses

ROOT = Path(__file__).resolve().parents[2]
CORES = sorted(os.sched_getaffinity(0))
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
BEGAN = time.monotonic()
CORRECT_ONLY = (
    "reward.preset=stage2",
    "reward.speed_weight=0",
    "timing_bench.timed=false",
)
"""Settings of a run in which correctness alone is paid and nothing is timed."""
DIGITS = 5
"""Of the numbers in a result."""

Result = dict[str, Any]
Kind = TypeVar("Kind")
packed = msgspec.msgpack.encode


# ── sub-commands ──────────────────────────────────────────────────────────────────────────────────────────────────


class Commands:
    """The sub-commands of one question: `@commands` adds a function, plain or async.

    Its parameters are the options, `/` makes positional ones, `*settings` takes key=value of a run. Bool becomes
    `--name/--no-name`, a tuple a list with commas. A parameter's text stands in `Annotated`.
    """

    def __init__(self, question: str, text: str | None) -> None:
        self.question, self._text = question, text or ""
        self.functions: dict[str, Callable[..., Any]] = {}
        self._inner: set[str] = set()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.functions[function.__name__.replace("_", "-")] = function
        return function

    def inner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What another sub-command starts as a process of its own; the help is silent about it."""
        self._inner.add(function.__name__.replace("_", "-"))
        return self(function)

    def main(self, words: Sequence[str] | None = None) -> None:
        asked = vars(self._parser().parse_args(words))
        name = asked.pop("command")
        function = self.functions[name]
        positional: list[Any] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += asked.pop(parameter.name)
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(asked.pop(parameter.name))
        try:
            found = function(*positional, **asked)
            if inspect.iscoroutine(found):
                found = asyncio.run(found)
        except KbrlError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        if found is not None:
            line = {"benchmark": f"{self.question} {name}", **found, "machine": machine()}
            print(json.dumps(rounded(line)), flush=True)
            sys.exit(0 if found.get("ok", True) else 1)

    def _parser(self) -> argparse.ArgumentParser:
        plain = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(
            f"python -m benchmarks.{self.question}", None, self._text, formatter_class=plain
        )
        below = parser.add_subparsers(dest="command", required=True, metavar="command")
        for name, function in self.functions.items():
            text = inspect.getdoc(function) or ""
            first = text.partition("\n")[0].replace("%", "%%")  # argparse fills in the help, not the description
            shown: dict[str, Any] = {} if name in self._inner else {"help": first}
            added = below.add_parser(name, description=text, formatter_class=plain, **shown)
            for parameter in inspect.signature(function, eval_str=True).parameters.values():
                _add_option(added, parameter)
        return parser


def _add_option(parser: argparse.ArgumentParser, given: inspect.Parameter) -> None:
    hint, text = given.annotation, ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, text = typing.get_args(hint)
    if types.NoneType in typing.get_args(hint):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if given.kind is given.VAR_POSITIONAL:
        parser.add_argument(given.name, nargs="*", metavar="key=value", help=text or "settings of the run")
        return
    is_required, inside = given.default is given.empty, typing.get_args(hint)
    words = (
        text
        if is_required or given.default in (None, "")
        else f"{text} (default: {_format_default(given.default)})".lstrip()
    )
    more: dict[str, Any] = {"help": words.replace("%", "%%"), "default": None if is_required else given.default}
    if hint is bool:
        more["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is tuple:
        more["type"] = lambda listed: tuple(inside[0](word) for word in listed.split(",") if word)
    elif typing.get_origin(hint) is typing.Literal:
        more["choices"] = inside
    else:
        more["type"] = hint
    if given.kind is given.POSITIONAL_ONLY:
        if not is_required:
            more["nargs"] = "?"
        parser.add_argument(given.name, **more)
    else:
        parser.add_argument(f"--{given.name.replace('_', '-')}", required=is_required, **more)


def _format_default(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case Mapping():
            return {name: rounded(inside) for name, inside in value.items()}
        case list() | tuple():
            return [rounded(inside) for inside in value]
    return str(value) if isinstance(value, Path) else value


def machine() -> Result:
    """What a figure needs beside it to be compared with another."""
    found = {"cpu": platform.machine(), "cores": len(CORES), "python": platform.python_version()}
    found |= {"load": round(os.getloadavg()[0], 1)}
    for name in ("torch", "vllm", "zmq"):
        if (module := sys.modules.get(name)) is not None:
            found[name] = module.__version__
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def say(*words: object) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f} s ", *map(rounded, words), file=sys.stderr, flush=True)


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def in_turn(kinds: Sequence[Kind], rounds: int) -> Iterator[tuple[int, Kind]]:
    """Every kind once a round, forth and back, so that what changes meanwhile meets a kind and its anchor alike."""
    for number in range(rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            yield number, kind


def percentiles(values: Sequence[float], *wanted: float) -> list[float]:
    """Interpolated; zeros where there is no value."""
    import numpy as np

    return [float(value) for value in np.percentile(values, wanted)] if len(values) else [0.0] * len(wanted)


def bootstrap(values: Sequence[float]) -> dict[str, float]:
    """Mean and its 95 % interval."""
    import numpy as np
    from scipy import stats

    mean = float(np.mean(values))
    if max(values) - min(values) < 1e-12:
        return {"mean": mean, "lo": mean, "hi": mean}
    interval = stats.bootstrap((values,), np.mean, rng=0).confidence_interval
    return {"mean": mean, "lo": float(interval.low), "hi": float(interval.high)}


def timed(action: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a page."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows))


def with_figures(page: str, marks: tuple[str, str], figures: str) -> str:
    """The page with its part between the two marks replaced."""
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"the page needs the lines {marks[0]} and {marks[1]}")
    return f"{before}{begin}\n{figures}\n{end}{after}"


# ── processes of ours ─────────────────────────────────────────────────────────────────────────────────────────────


def environment(**more: str) -> dict[str, str]:
    """This one without what a run of ours may have set, for processes that shall import this very code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KBRL_", "HONCHO_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, **more}


def command(question: str, *words: object) -> list[str]:
    """Of a sub-command, to be started as a process."""
    return [sys.executable, "-m", f"benchmarks.{question}", *map(str, words)]


def kbrl_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "kbrl_async", *map(str, words)]


def kbrl(*words: object, log: Path | None = None, cores: Sequence[int] = ()) -> None:
    """Runs a command of kbrl, on these cores; what it prints goes to `log` or stderr.

    :raises RuntimeError: it failed.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, len(cores) - 1))} if cores else {}
    with log.open("ab") if log else contextlib.nullcontext(sys.stderr) as output:
        done = subprocess.run(
            kbrl_command(*words), env=environment(**threads), stdout=output,
            stderr=subprocess.STDOUT if log else None, check=False,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"kbrl {words[0]} ended with {done.returncode}{f'; see {log}' if log else ''}")


@contextlib.contextmanager
def services(run_dir: Path, *instances: str, **more: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Services of a run as processes of their own, as `kbrl train` starts them; `broker.1` is one."""
    base = environment(KBRL_RUN_DIR=str(run_dir), **more)
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", f"services.{name.partition('.')[0]}"], env={**base, "HONCHO_PROCESS_NAME": name}
        )
        for name in instances
    }
    try:
        yield started
    finally:
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        for process in started.values():
            process.wait(120)


def broker_options(folder: Path, **more: Any) -> BrokerOptions:
    """On the local sockets of that folder, with leases and queues that never are the limit."""
    found = addresses(folder)
    roomy = LedgerOptions(compile=StageOptions(ttl_s=60.0, queue_limit=100_000), finished_limit=100_000)
    given = {"status_address": found.status, "ledger": roomy, **more}
    return BrokerOptions(str(folder), found.submit, found.work, **given)


@contextlib.contextmanager
def broker_process(options: BrokerOptions) -> Iterator[psutil.Process]:
    process = mp.get_context("spawn").Process(target=_serve, args=(options,))
    process.start()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join()


def _serve(options: BrokerOptions) -> None:
    import uvloop

    from kbrl_async.runs.telemetry import logs
    from services.broker.descriptors import raise_descriptor_limit
    from services.broker.server import BrokerServer

    logs.configure("broker", Path(options.run_dir), "info", terminal=False)
    raise_descriptor_limit()
    os.sched_setaffinity(0, CORES)
    uvloop.run(BrokerServer(options).run())


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(run: Path) -> list[TurnRow]:
    with ArchiveReader(run / "rollouts.sqlite") as archive:
        return list(archive.rows())


def updates_of(run: Path) -> list[UpdateRow]:
    if not (run / "rollouts.sqlite").exists():
        return []
    with ArchiveReader(run / "rollouts.sqlite") as archive:
        return archive.updates()


def summary_of(run: Path) -> Result:
    """Empty before the run's end."""
    path = run / "summary.json"
    found: Result = json.loads(path.read_text()) if path.exists() else {}
    return found
