"""The nanny over each service process: what an exit means, how signals travel, and a broker that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.runtime import Producer, addresses
from services.runtime.nanny import Nanny

SERVICE = """
import asyncio, os, sys
from pathlib import Path
from kbrl_async.errors import DiskFull
from services.runtime.nanny import run_service

async def main(stop):
    starts = Path(sys.argv[2])
    starts.write_text(starts.read_text() + f"{os.getpid()}\\n" if starts.exists() else f"{os.getpid()}\\n")
    match sys.argv[1]:
        case "finishes": return
        case "is_full": raise ExceptionGroup("several", [DiskFull("no space left", "Free some space")])
        case "crashes_once" if len(starts.read_text().split()) > 1: return
        case "crashes_once": os.kill(os.getpid(), 9)
        case "waits": await stop.wait(); print("bye", flush=True)
        case "is_deaf": await asyncio.Event().wait()

if __name__ == "__main__":
    run_service("demo", main)
"""
BROKER = """
import sys
from services.runtime.nanny import run_service

async def main(stop):
    from services.broker.options import BrokerOptions
    from services.broker.server import Broker
    from services.runtime.addresses import addresses
    found = addresses(sys.argv[1])
    await Broker(BrokerOptions(sys.argv[1], found.submit, found.work)).run(stop)

if __name__ == "__main__":
    run_service("broker", main)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd()}


def command(tmp_path: Path, how: str) -> list[str]:
    (tmp_path / "demo.py").write_text(SERVICE)
    return [sys.executable, str(tmp_path / "demo.py"), how, str(tmp_path / "starts")]


def play(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tmp_path, how), env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


def starts(tmp_path: Path) -> list[int]:
    path = tmp_path / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def until_started(tmp_path: Path) -> int:
    deadline = time.monotonic() + 60
    while not starts(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return starts(tmp_path)[0]


def test_a_service_that_finishes_ends_with_zero(tmp_path: Path) -> None:
    assert play(tmp_path, "finishes").returncode == 0
    assert len(starts(tmp_path)) == 1


def test_an_error_with_a_cure_is_one_line_and_no_new_start(tmp_path: Path) -> None:
    done = play(tmp_path, "is_full")
    assert (done.returncode, done.stderr) == (3, "error: no space left. Free some space\n")
    assert len(starts(tmp_path)) == 1


def test_a_service_that_is_killed_starts_again(tmp_path: Path) -> None:
    done = play(tmp_path, "crashes_once")
    assert done.returncode == 0
    assert "ended by signal 9; starting again" in done.stderr
    assert len(starts(tmp_path)) == 2


def test_a_service_that_crashes_again_and_again_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    nanny = Nanny("demo", [sys.executable, "-S", "-c", "raise SystemExit(7)"], max_crashes=3, first_wait_s=0.01)
    assert nanny.run() == 1
    assert "error: demo crashed 3 times, last with code 7" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_child_which_ends_in_peace(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(command(tmp_path, "waits"), env=ENVIRONMENT, stdout=subprocess.PIPE) as nanny:
        until_started(tmp_path)
        nanny.send_signal(number)
        assert nanny.wait(timeout=60) == 0
        assert nanny.stdout is not None
        assert nanny.stdout.read() == b"bye\n"


def test_a_child_dies_with_its_nanny(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, "is_deaf"), env=ENVIRONMENT) as nanny:
        child = until_started(tmp_path)
        nanny.kill()
    deadline = time.monotonic() + 60
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_an_error_before_the_first_child_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "KBRL_RUN_DIR": str(tmp_path / "nothing")}
    done = subprocess.run(
        [sys.executable, "-m", "services.broker"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "is no run folder" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_broker_process_survives_kill_nine_and_remembers(tmp_path: Path) -> None:
    (tmp_path / "broker_service.py").write_text(BROKER)

    async def submit_through_a_crash(broker: subprocess.Popen[bytes]) -> list[bool]:
        async with Producer(addresses(tmp_path).submit, silence_s=0.1) as producer:
            first = await producer.submit("t1", "compile", [b"x"])
            child = int(subprocess.check_output(["pgrep", "-P", str(broker.pid)]))
            os.kill(child, signal.SIGKILL)
            second = await producer.submit("t2", "compile", [b"x"])
            return [first, second, await producer.submit("t1", "compile", [b"x"])]

    command = [sys.executable, str(tmp_path / "broker_service.py"), str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT) as broker:
        new = asyncio.run(asyncio.wait_for(submit_through_a_crash(broker), 60))
        broker.terminate()
        assert broker.wait(timeout=60) == 0
    assert new == [True, True, False]
