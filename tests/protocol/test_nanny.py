"""The nanny over each service process: what an exit means, how signals travel, and a broker that is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import services.runtime.nanny as nanny_module
from kbrl_async.lineage import LAUNCHER, identity, lives
from services.runtime import Producer, addresses
from services.runtime.nanny import Nanny

SERVICE = """
import asyncio, os, sys, threading
from pathlib import Path
from kbrl_async.errors import DiskFull, HostError, InfraError
from services.runtime import nanny, pulse
from services.runtime.nanny import run_service
from services.runtime.pulse import serving

nanny.STOP_GRACE_S = 50.0  # a child that the host has stand still is not killed for it
pulse.EXIT_GRACE_S = 1.0

def spin():
    while True: pass

async def main(stop):
    starts = Path(sys.argv[2])
    starts.write_text(starts.read_text() + f"{os.getpid()}\\n" if starts.exists() else f"{os.getpid()}\\n")
    match sys.argv[1]:
        case "finishes": return
        case "lacks": raise ExceptionGroup("several", [HostError("there is no compiler", "Install one")])
        case "unlucky_once" if len(starts.read_text().split()) > 1: return
        case "unlucky_once": raise InfraError("the sandbox zygote did not start", "It is tried again")
        case "lingers_once" | "lingers_in_its_pool_once" if len(starts.read_text().split()) > 1: return
        case "lingers_once":
            threading.Thread(target=spin).start()
            raise InfraError("a rank is gone", "It is tried again")
        case "lingers_in_its_pool_once":
            asyncio.get_running_loop().run_in_executor(None, spin)
            raise InfraError("a rank is gone", "It is tried again")
        case "lacks_and_lingers":
            threading.Thread(target=spin).start()
            raise HostError("there is no compiler", "Install one")
        case "is_full_once" if len(starts.read_text().split()) > 1: return
        case "is_full_once": raise ExceptionGroup("several", [DiskFull("no space left", "Free some space")])
        case "stops_once" if len(starts.read_text().split()) > 1: return
        case "stops_once":
            serving()
            await asyncio.sleep(1)
            os.kill(os.getpid(), 19)
        case "crashes_once" if len(starts.read_text().split()) > 1: return
        case "crashes_once": os.kill(os.getpid(), 9)
        case "waits": await stop.wait(); print("bye", flush=True)
        case "is_deaf": await asyncio.Event().wait()

if __name__ == "__main__":
    run_service("demo", main)
"""
BROKER = """
import sys
from services.runtime import nanny
from services.runtime.nanny import run_service

nanny.STOP_GRACE_S = 50.0

async def main(stop):
    from services.broker.options import BrokerOptions
    from services.broker.server import BrokerServer
    from services.runtime.addresses import addresses
    found = addresses(sys.argv[1])
    await BrokerServer(BrokerOptions(sys.argv[1], found.submit, found.work)).run(stop)

if __name__ == "__main__":
    run_service("broker", main)
"""
pytestmark = pytest.mark.timeout(600)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd()}
PATIENCE_S = 200.0


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A nanny that runs in this process takes them, and later tests of it would find its handlers."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def command(tmp_path: Path, how: str) -> list[str]:
    (tmp_path / "demo.py").write_text(SERVICE)
    return [sys.executable, str(tmp_path / "demo.py"), how, str(tmp_path / "starts")]


def play(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tmp_path, how), env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S)


def starts(tmp_path: Path) -> list[int]:
    path = tmp_path / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def until_started(tmp_path: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while not starts(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return starts(tmp_path)[0]


def said_of_two_starts(tmp_path: Path, how: str) -> str:
    """stderr of a service that ends well the second time."""
    done = play(tmp_path, how)
    assert done.returncode == 0
    assert len(starts(tmp_path)) == 2
    return done.stderr


def test_a_service_that_finishes_ends_with_zero(tmp_path: Path) -> None:
    assert play(tmp_path, "finishes").returncode == 0
    assert len(starts(tmp_path)) == 1


def test_an_error_with_a_cure_is_one_line_and_no_new_start(tmp_path: Path) -> None:
    done = play(tmp_path, "lacks")
    assert (done.returncode, done.stderr) == (3, "error: there is no compiler. Install one\n")
    assert len(starts(tmp_path)) == 1


def test_a_failure_of_the_infrastructure_is_a_crash_and_tried_again(tmp_path: Path) -> None:
    done = play(tmp_path, "unlucky_once")
    assert done.returncode == 0
    assert "error: the sandbox zygote did not start. It is tried again\ndemo ended with code 1; starting" in done.stderr


@pytest.mark.parametrize("where", ["lingers_once", "lingers_in_its_pool_once"])
def test_a_child_that_failed_and_does_not_end_is_ended_and_starts_again(tmp_path: Path, where: str) -> None:
    said = said_of_two_starts(tmp_path, where)
    assert "error: a rank is gone" in said
    assert "it failed and did not end in 1 s; it is killed" in said
    assert "ended with code 1; starting again" in said


def test_a_final_error_of_a_child_that_does_not_end_is_final(tmp_path: Path) -> None:
    done = play(tmp_path, "lacks_and_lingers")
    assert done.returncode == 3
    assert "error: there is no compiler. Install one" in done.stderr
    assert len(starts(tmp_path)) == 1


def test_a_child_that_finds_the_disk_full_says_so_and_starts_again(tmp_path: Path) -> None:
    said = said_of_two_starts(tmp_path, "is_full_once")
    assert "error: no space left. Free some space\ndemo waits for room on the disk" in said


def full_nanny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: Iterator[int], wait_s: float) -> Nanny:
    """Its child finds the disk full, the second time not."""
    monkeypatch.setattr(nanny_module, "FULL_PAUSE_S", 0.01)
    mark = tmp_path / "started"
    script = f"import os, sys; new = not os.path.exists({str(mark)!r}); open({str(mark)!r}, 'w'); sys.exit(75 * new)"
    return Nanny("demo", [sys.executable, "-S", "-c", script], room=lambda: next(room), full_wait_s=wait_s)


def test_it_is_started_again_once_there_is_room_however_often_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = iter([0] * 20 + [1 << 30])
    assert full_nanny(monkeypatch, tmp_path, room, 60).run() == 0
    assert next(room, None) is None, "it looked until there was room"


def test_a_disk_that_stays_full_ends_with_the_host_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert full_nanny(monkeypatch, tmp_path, itertools.repeat(0), 0.05).run() == 3
    assert "error: demo has found no room on the disk" in capfd.readouterr().err


def test_a_child_that_stands_still_is_killed_and_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "KBRL_WEDGED_S", "1")
    assert "demo does nothing any more: no sign of life" in said_of_two_starts(tmp_path, "stops_once")


def test_a_service_that_is_killed_starts_again(tmp_path: Path) -> None:
    assert "ended by signal 9; starting again" in said_of_two_starts(tmp_path, "crashes_once")


def test_a_service_that_crashes_again_and_again_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    nanny = Nanny(
        "demo", [sys.executable, "-S", "-c", "raise SystemExit(7)"], max_crashes=3, window_s=600, first_wait_s=0.01
    )
    assert nanny.run() == 1
    assert "error: demo crashed 3 times, last with code 7" in capfd.readouterr().err


class Ages:
    """A clock by which each child of a nanny lives as long as it is told."""

    def __init__(self, *lives_s: float) -> None:
        self.now = 0.0
        self._lives = iter(lives_s)

    def __call__(self) -> float:
        return self.now

    def live(self) -> int:
        lived_s = next(self._lives, None)
        if lived_s is None:
            return 0
        self.now += lived_s
        return 7


def test_a_child_that_was_at_work_is_back_at_once_and_one_that_was_not_waits_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ages = Ages(600, 6, 1, 2, 500, 3)
    nanny = Nanny("demo", [], clock=ages, max_crashes=9)

    def run_once() -> int:
        nanny._began = ages.now
        return ages.live()

    monkeypatch.setattr(nanny, "_run_once", run_once)
    monkeypatch.setattr(nanny, "_sleep", lambda _: None)
    assert nanny.run() == 0
    said = [line.rpartition("starting again ")[2] for line in capfd.readouterr().err.splitlines()]
    assert said == ["at once", "at once", "in 0.25 s", "in 0.5 s", "at once", "in 0.25 s"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_child_which_ends_in_peace(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(command(tmp_path, "waits"), env=ENVIRONMENT, stdout=subprocess.PIPE) as nanny:
        until_started(tmp_path)
        nanny.send_signal(number)
        assert nanny.wait(timeout=PATIENCE_S) == 0
        assert nanny.stdout is not None
        assert nanny.stdout.read() == b"bye\n"


def test_a_child_dies_with_its_nanny(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, "is_deaf"), env=ENVIRONMENT) as nanny:
        child = until_started(tmp_path)
        nanny.kill()
    deadline = time.monotonic() + PATIENCE_S
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _lives(child)


def test_a_child_that_has_not_come_to_its_first_line_dies_with_it_too(tmp_path: Path) -> None:
    slow = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(600)"
    program = (
        f"import sys; from services.runtime.nanny import Nanny; Nanny('demo', [sys.executable, '-c', {slow!r}]).run()"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT) as nanny:
        said = tmp_path / "pid"
        deadline = time.monotonic() + PATIENCE_S
        while not (said.exists() and said.read_text().endswith(".")) and time.monotonic() < deadline:
            time.sleep(0.02)
        child = int(said.read_text().removesuffix("."))
        nanny.kill()
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _lives(child)


def test_a_nanny_whose_launcher_is_gone_drains_and_ends(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as launcher:
        environment = {**ENVIRONMENT, LAUNCHER: identity(launcher.pid)}
        with subprocess.Popen(command(tmp_path, "waits"), env=environment, stdout=subprocess.PIPE) as nanny:
            until_started(tmp_path)
            launcher.kill()  # and nobody waits for it yet: it is a zombie, and gone all the same
            assert nanny.wait(timeout=PATIENCE_S) == 0
            assert nanny.stdout is not None
            assert nanny.stdout.read() == b"bye\n"


@pytest.mark.parametrize(("beat", "code"), [(b".", 0), (b"!", 1)], ids=["starts", "serves"])
def test_who_has_to_be_killed_at_a_stop_has_failed_only_if_it_was_at_work(
    monkeypatch: pytest.MonkeyPatch, beat: bytes, code: int
) -> None:
    """A start, such as the reading of a large model, can't hear a signal, and holds nothing yet."""
    monkeypatch.setattr(nanny_module, "LAUNCHER_LOOK_S", 0.0)
    monkeypatch.setattr(nanny_module, "STOP_GRACE_S", 0.0)
    with subprocess.Popen(["sleep", "600"]) as launcher:
        deaf = f"""
import fcntl, os, signal, termios, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pulse = int(os.environ["KBRL_NANNY_PULSE"])
os.write(pulse, {beat!r})
while any(fcntl.ioctl(pulse, termios.FIONREAD, bytes(4))):  # its nanny has not heard it yet
    time.sleep(0.01)
os.kill({launcher.pid}, 9)
time.sleep(600)"""
        assert Nanny("demo", [sys.executable, "-S", "-c", deaf], launcher=identity(launcher.pid)).run() == code


def test_a_nanny_that_waits_to_start_its_child_again_notices_it_too(capfd: pytest.CaptureFixture[str]) -> None:
    crash = [sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(["true"]) as launcher:
        gone = identity(launcher.pid)
    assert Nanny("demo", crash, first_wait_s=600.0, launcher=gone or "1:0").run() == 0
    assert "the process that started it is gone" in capfd.readouterr().err


def test_a_nanny_without_a_launcher_or_with_one_that_lives_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanny_module, "LAUNCHER_LOOK_S", 0.0)
    script = [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(3)"]
    for launcher in ("", identity()):
        assert Nanny("demo", script, launcher=launcher).run() == 3


def test_a_later_process_with_the_pid_of_the_launcher_is_not_taken_for_it() -> None:
    pid, _, start = identity().partition(":")
    assert lives(f"{pid}:{start}")
    assert not lives(f"{pid}:{int(start) - 1}")
    assert not lives("")


def test_a_launcher_that_can_not_be_looked_at_just_now_is_not_taken_for_dead(tmp_path: Path) -> None:
    (tmp_path / "7" / "stat").mkdir(parents=True)
    assert lives("7:1", tmp_path)
    assert not lives("8:1", tmp_path)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_an_error_before_the_first_child_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "KBRL_RUN_DIR": str(tmp_path / "nothing")}
    done = subprocess.run(
        [sys.executable, "-m", "services.broker"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
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
        try:
            new = asyncio.run(asyncio.wait_for(submit_through_a_crash(broker), PATIENCE_S))
            broker.terminate()
            assert broker.wait(timeout=PATIENCE_S) == 0
        finally:
            broker.kill()
    assert new == [True, True, False]
