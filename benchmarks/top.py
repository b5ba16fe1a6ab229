"""What `kbrl top` costs: CPU of the viewer and of the broker it asks, on a system with a full queue and many workers.

    python benchmarks/top.py [RUN] [--seconds 20] [--workers 32] [--tasks 10000]

Without RUN it makes a system of its own: a broker process with `--tasks` queued tasks, and `--workers` workers that
beat and hold leases. The viewer runs in a pseudo terminal of 80 × 24 and of 200 × 60, as a person would see it. The
anchor is the broker's CPU over the same time without a viewer. One JSON line comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import platform
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from kbrl_async.runs.config import Config, to_yaml
from protocols.messages import Stage
from services.broker.options import BrokerOptions
from services.broker.server import Broker
from services.runtime import Producer, Worker, addresses

SETTLE_S = 2.0
"""From the first picture on; starting Python and importing is not what a viewer costs."""
START_S = 120.0


async def serve(folder: Path) -> None:
    found = addresses(folder)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await Broker(BrokerOptions(str(folder), found.submit, found.work, status_address=found.status)).run(stop)


async def populate(folder: Path, workers: int, tasks: int, ready: threading.Event, stop: threading.Event) -> None:
    async def hangs(_: object, __: list[bytes]) -> None:
        await asyncio.sleep(3600)

    found = addresses(folder)
    stages = [Stage.GENERATE, Stage.COMPILE, Stage.BENCH, Stage.SCORE]
    made = [Worker(found.work, f"{stages[n % 4]}.{n}", [stages[n % 4]], 8, hangs, drain_s=0) for n in range(workers)]
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


@contextlib.contextmanager
def system(workers: int, tasks: int) -> Iterator[tuple[Path, psutil.Process]]:
    """A run folder and the process of its broker."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bench"
        folder.mkdir()
        (folder / "config.yaml").write_text(to_yaml(Config(name="bench")))
        broker = subprocess.Popen([sys.executable, __file__, "--serve", str(folder)])
        ready, stop = threading.Event(), threading.Event()
        crowd = threading.Thread(target=lambda: asyncio.run(populate(folder, workers, tasks, ready, stop)))
        crowd.start()
        try:
            if not ready.wait(120):
                raise SystemExit("the system did not come up")
            yield folder, psutil.Process(broker.pid)
        finally:
            stop.set()
            crowd.join()
            broker.terminate()
            broker.wait()


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def viewer(run: Path, columns: int, lines: int, seconds: float, broker: psutil.Process | None) -> dict[str, float]:
    """Share of a core that the viewer and the broker used while one looked on."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
    command = [sys.executable, "-m", "kbrl_async", "top", str(run), "--interval", "1"]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
    os.close(slave)
    drawn = [0]

    def swallow() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(master, 65536):
                drawn[0] += len(data)

    reader = threading.Thread(target=swallow, daemon=True)
    reader.start()
    try:
        process = psutil.Process(child.pid)
        until = time.monotonic() + START_S
        while not drawn[0] and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        started = spent(process)
        begun, before, broker_before = time.monotonic(), spent(process), spent(broker) if broker else 0.0
        bytes_before = drawn[0]
        time.sleep(seconds)
        elapsed = time.monotonic() - begun
        share = (spent(process) - before) / elapsed
        asked = (spent(broker) - broker_before) / elapsed if broker else 0.0
        return {
            "viewer_core_share": round(share, 4),
            "broker_core_share": round(asked, 4),
            "start_cpu_s": round(started, 2),
            "rss_mb": round(process.memory_info().rss / 2**20, 1),
            "kb_drawn_per_s": round((drawn[0] - bytes_before) / elapsed / 1000, 2),
        }
    finally:
        child.terminate()
        child.wait(10)
        os.close(master)


def measure(args: argparse.Namespace) -> dict[str, object]:
    sizes = {"80x24": (80, 24), "200x60": (200, 60)}
    if args.run:
        return {name: viewer(Path(args.run), *size, args.seconds, None) for name, size in sizes.items()}
    with system(args.workers, args.tasks) as (folder, broker):
        time.sleep(2)
        begun, before = time.monotonic(), spent(broker)
        time.sleep(args.seconds)
        anchor = (spent(broker) - before) / (time.monotonic() - begun)
        seen = {name: viewer(folder, *size, args.seconds, broker) for name, size in sizes.items()}
    return {"broker_core_share_without_viewer": round(anchor, 4), **seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="folder of a running run; default: a system of our own")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(Path(args.serve)))
        return
    found = measure(args)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(json.dumps({"benchmark": "top", "machine": machine, "limit": 0.03, "run": bool(args.run), **found}))


if __name__ == "__main__":
    main()
