"""What looking at a run costs: its report, and a live view."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil

from benchmarks.harness import Result, broker_options, broker_process, cpu_s, kbrl, kbrl_command
from kbrl_async.runs.config import Config, to_yaml
from protocols.messages import Stage
from services.runtime import Producer, Worker, WorkerOptions, addresses
from tests import artificial_run, browser

PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


def report(
    rollouts: int = 10_000,
    problems: int = 250,
    repeats: int = 3,
    keep: Annotated[Path | None, "leave the run folder and the page here"] = None,
) -> Result:
    """How long the report of a large run takes: to make, and to open in headless Chromium.

    Makes an artificial run folder with the writers that runs use. `open_s` is what has to stay below 3: in a browser
    that runs, from the request to a loaded and painted page; `open_main_thread_s` is the work in it, whatever else the
    machine does. The anchor is the same browser opening an empty page.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        run = artificial_run.make(folder / "large", rollouts, problems=problems)
        page, blank, made = folder / "report.html", folder / "blank.html", []
        blank.write_text("<!DOCTYPE html><title>blank</title>")
        for _ in range(repeats):
            begin = time.monotonic()
            kbrl("report", run, "--output", page)
            made.append(time.monotonic() - begin)
        loads = [_opened(page) for _ in range(repeats)]
        anchor = [_opened(blank)[0] for _ in range(repeats)]
        size = page.stat().st_size
    slowest = max(seconds for seconds, _, _ in loads)
    return {
        "ok": slowest <= 3.0, "rollouts": rollouts, "problems": problems, "make_s": median(made),
        "open_s": median(seconds for seconds, _, _ in loads), "open_worst_s": slowest,
        "open_main_thread_s": median(work for _, work, _ in loads), "anchor_open_blank_s": median(anchor),
        "megabytes": size / 1e6, "elements": loads[0][2],
    }  # fmt: skip


def _opened(page: Path) -> tuple[float, float, int]:
    """Seconds until the page is loaded and painted, those of them that its main thread worked, and its elements."""
    with tempfile.TemporaryDirectory() as folder, browser.Browser(Path(folder)) as started:
        tab = started.open(page, domains=("Log", "Network", "Performance"))
        begin = time.monotonic()
        tab.evaluate(PAINTED)
        seconds = tab.load_s + time.monotonic() - begin
        assert tab.complaints() == [], tab.complaints()
        metrics = {metric["name"]: metric["value"] for metric in tab.ask("Performance.getMetrics")["metrics"]}
        return seconds, metrics["TaskDuration"], int(tab.evaluate("document.querySelectorAll('*').length"))


SETTLE_S, START_S = 2.0, 120.0
"""From the first picture on; starting Python and importing is not what a viewer costs."""
SIZES = {"80x24": (80, 24), "200x60": (200, 60)}


def top(seconds: float = 20.0, workers: int = 32, tasks: int = 10_000) -> Result:
    """What `kbrl top` costs: CPU of the viewer and of the broker it asks, with a full queue and many workers.

    The viewer runs in a pseudo terminal of 80 × 24 and of 200 × 60, as a person would see it; it may use .03 of a core.
    The anchor is the broker's CPU over the same time without a viewer.
    """
    with _system(workers, tasks) as (folder, broker):
        time.sleep(2)
        begun, before = time.monotonic(), cpu_s(broker)
        time.sleep(seconds)
        anchor = (cpu_s(broker) - before) / (time.monotonic() - begun)
        seen = {name: _viewer(folder, *size, seconds, broker) for name, size in SIZES.items()}
    return {"broker_core_share_without_viewer": anchor, **seen}


@contextlib.contextmanager
def _system(workers: int, tasks: int) -> Iterator[tuple[Path, psutil.Process]]:
    """A run folder and the process of its broker, which has so many queued tasks and busy workers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bench"
        folder.mkdir()
        (folder / "config.yaml").write_text(to_yaml(Config(name="bench")))
        with broker_process(broker_options(folder)) as broker:
            ready, stop = threading.Event(), threading.Event()
            crowd = threading.Thread(target=lambda: asyncio.run(_populate(folder, workers, tasks, ready, stop)))
            crowd.start()
            try:
                if not ready.wait(START_S):
                    raise SystemExit("the system did not come up")
                yield folder, broker
            finally:
                stop.set()
                crowd.join()


async def _populate(folder: Path, workers: int, tasks: int, ready: threading.Event, stop: threading.Event) -> None:
    async def hangs(_: object, __: list[bytes]) -> None:
        await asyncio.sleep(3600)

    found = addresses(folder)
    stages = [Stage.GENERATE, Stage.COMPILE, Stage.BENCH, Stage.SCORE]
    made = [
        Worker(found.work, f"{stages[n % 4]}.{n}", [stages[n % 4]], 8, hangs, WorkerOptions(drain_s=0))
        for n in range(workers)
    ]
    running = [asyncio.create_task(worker.run()) for worker in made]
    async with Producer(found.submit) as producer:
        for begin in range(0, tasks, 200):
            names = range(begin, min(tasks, begin + 200))
            await asyncio.gather(*(producer.submit(f"g{n}.r0", Stage.GENERATE, [b"x" * 100]) for n in names))
    ready.set()
    await asyncio.to_thread(stop.wait)
    for worker in made:
        worker.stop()
    await asyncio.gather(*running, return_exceptions=True)


def _viewer(run: Path, columns: int, lines: int, seconds: float, broker: psutil.Process) -> Result:
    """Share of a core that the viewer and the broker used while one looked on."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    terminal = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
    command = kbrl_command("top", run, "--interval", 1)
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=terminal, start_new_session=True)
    os.close(slave)
    drawn = 0

    def swallow() -> None:
        nonlocal drawn
        with contextlib.suppress(OSError):
            while data := os.read(master, 65536):
                drawn += len(data)

    threading.Thread(target=swallow, daemon=True).start()
    try:
        process, until = psutil.Process(child.pid), time.monotonic() + START_S
        while not drawn and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        begun, started, asked, drawn_before = time.monotonic(), cpu_s(process), cpu_s(broker), drawn
        time.sleep(seconds)
        elapsed = time.monotonic() - begun
        return {
            "viewer_core_share": (cpu_s(process) - started) / elapsed,
            "broker_core_share": (cpu_s(broker) - asked) / elapsed,
            "start_cpu_s": started,
            "rss_mb": process.memory_info().rss / 2**20,
            "kb_drawn_per_s": (drawn - drawn_before) / elapsed / 1000,
        }
    finally:
        child.terminate()
        child.wait(10)
        os.close(master)
