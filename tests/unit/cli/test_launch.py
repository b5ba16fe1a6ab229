"""Processes of a run start together, show their lines, and end together."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import pytest
from honcho.printer import Message

from kbrl_async.cli import launch
from kbrl_async.errors import AddressTaken
from kbrl_async.lineage import identity
from kbrl_async.runs.telemetry import progress
from kbrl_async.runs.telemetry.progress import Reporter
from tests.unit.services.log import Log

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from pathlib import Path

from honcho.printer import Message

from kbrl_async.cli import launch
launch.GRACE_S = PATIENCE
scripts = dict(zip(sys.argv[2::2], sys.argv[3::2]))
ended = launch.start_and_wait(Path(sys.argv[1]), dict.fromkeys(scripts, 1) | COUNTS, command=scripts.__getitem__)
print("ended:", ended.first or "-", ended.code, ended.interrupted)
"""
SPOILED = """
import sys
from pathlib import Path
from kbrl_async.cli import launch

launch.GRACE_S = 1.0
scripts = dict(zip(sys.argv[2::2], sys.argv[3::2]))
SPOIL
ended = launch.start_and_wait(Path(sys.argv[1]), dict.fromkeys(scripts, 1), command=scripts.__getitem__)
sys.stdout.flush()
sys.exit(ended.code)
"""
RAISES = """
def spoiled(self, message):
    if message.name == "learner":
        raise ZeroDivisionError
launch.Printer.write = spoiled
"""
NOT_STARTED = """
run = launch.Manager()._process_ctor.run
def spoiled(self, events=None, ignore_signals=False):
    if self.name == "learner":
        raise OSError("no more processes")
    run(self, events, ignore_signals)
launch.Manager()._process_ctor.run = spoiled
"""
SERVICE = """
import os, sys
from pathlib import Path
from services.runtime import nanny
from services.runtime.nanny import run_service

nanny.STOP_GRACE_S = 50.0  # a child that the host has stand still is not killed for it

async def main(stop):
    Path(sys.argv[1]).write_text(f"{os.getpid()} {os.getppid()}")
    await stop.wait()
    Path(sys.argv[1]).with_name("drained").touch()

if __name__ == "__main__":
    run_service("broker", main)
"""
FOREVER = "exec sleep 300"
LONG_S = 100.0


def start(run_dir: Path, counts: str = "{}", grace_s: float = 30.0, **scripts: str) -> subprocess.Popen[str]:
    argv = [str(run_dir), *(word for pair in scripts.items() for word in pair)]
    program = PROGRAM.replace("COUNTS", counts).replace("PATIENCE", str(grace_s))
    command = [sys.executable, "-c", program, *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def spoiled(
    run_dir: Path, spoil: str, stdout: IO[str] | int, env: dict[str, str] | None = None, **scripts: str
) -> subprocess.Popen[str]:
    """A launcher of its own session, so that a test that fails leaves nothing of it."""
    argv = [str(run_dir), *(word for pair in scripts.items() for word in pair)]
    command = [sys.executable, "-c", SPOILED.replace("SPOIL", spoil), *argv]
    environment = {**os.environ, **(env or {})}
    return subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment, start_new_session=True
    )


def said(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it wrote; fails where it has not ended in time."""
    try:
        return process.communicate(timeout=LONG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


def finished(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=100)
    return out


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_are_shown_with_the_name_of_their_process(tmp_path: Path) -> None:
    out = finished(start(tmp_path, sampler="echo hello"))
    assert "sampler | hello" in " ".join(out.split())


def test_the_end_of_one_ends_all(tmp_path: Path) -> None:
    assert "ended: aggregator 0 False" in finished(start(tmp_path, aggregator="true", broker=FOREVER))


def test_the_first_that_gives_up_gives_the_exit_code(tmp_path: Path) -> None:
    out = finished(start(tmp_path, learner="exit 4", broker="trap 'exit 9' TERM; sleep 300 & wait"))
    assert "ended: learner 4 False" in out


def test_a_killed_process_counts_as_a_shell_counts(tmp_path: Path) -> None:
    assert "ended: learner 137 False" in finished(start(tmp_path, learner="kill -9 $$", broker=FOREVER))


def test_each_process_knows_its_run_and_its_number(tmp_path: Path) -> None:
    show = 'echo "$HONCHO_PROCESS_NAME $KBRL_RUN_DIR $PYTHONUNBUFFERED"; touch "$KBRL_RUN_DIR/$HONCHO_PROCESS_NAME"'
    show += '; cd "$KBRL_RUN_DIR"; until [ -e farm.1 ] && [ -e farm.2 ]; do sleep 0.02; done'
    out = finished(start(tmp_path, "{'farm': 2}", farm=show))
    for instance in ("farm.1", "farm.2"):
        assert f"{instance} {tmp_path} 1" in out


def test_ctrl_c_stops_all(tmp_path: Path) -> None:
    process = start(tmp_path, broker=f"touch {tmp_path}/up; {FOREVER}")
    wait_for(lambda: (tmp_path / "up").exists())
    process.send_signal(signal.SIGINT)
    assert "ended: - 130 True" in finished(process)


def test_a_terminal_that_is_closed_stops_all_in_order(tmp_path: Path) -> None:
    process = start(
        tmp_path, broker=f"trap 'touch {tmp_path}/drained; exit 0' TERM; touch {tmp_path}/up; sleep 300 & wait"
    )
    wait_for(lambda: (tmp_path / "up").exists())
    process.send_signal(signal.SIGHUP)
    assert "ended: - 129 True" in finished(process)
    assert (tmp_path / "drained").exists()


def test_a_second_launcher_of_a_run_is_refused_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, broker=f"touch {tmp_path}/up; {FOREVER}")
    wait_for(lambda: (tmp_path / "up").exists())
    with pytest.raises(AddressTaken, match=f"is held by process {process.pid}: its run is going on"):
        launch.start_and_wait(tmp_path, {"broker": 1}, command=lambda _name: "true")
    process.send_signal(signal.SIGINT)
    finished(process)
    assert "ended: broker 0" in finished(start(tmp_path, broker="true"))


def test_a_run_whose_lines_nobody_reads_any_more_stops(tmp_path: Path) -> None:
    """`kbrl train | head`, or a `tee` that was killed: it can't be seen any more, nor reached by Ctrl-C."""
    script = f"trap 'touch {tmp_path}/drained; exit 0' TERM; while true; do echo line; sleep 0.05; done"
    process = start(tmp_path, broker=script)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=60)
    assert (tmp_path / "drained").exists()


def test_what_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; trap '' TERM; touch {tmp_path}/up; while true; do sleep 0.1; done"
    process = start(tmp_path, grace_s=1.0, broker=script)
    wait_for(lambda: (tmp_path / "up").exists())
    process.send_signal(signal.SIGTERM)
    assert "ended: - 143 True" in finished(process)
    pid = (tmp_path / "pid").read_text().strip()
    wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())


def test_each_process_knows_who_has_started_it(tmp_path: Path) -> None:
    process = start(tmp_path, sampler="echo by $KBRL_LAUNCHER.", broker=FOREVER)
    assert f"by {process.pid}:" in finished(process)


def test_no_service_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "demo.py").write_text(SERVICE)
    process = start(tmp_path, broker=f"PYTHONPATH={ROOT} exec {sys.executable} {tmp_path}/demo.py {tmp_path}/up")
    try:
        wait_for(lambda: (tmp_path / "up").exists() and len((tmp_path / "up").read_text().split()) == 2)
        process.kill()
        wait_for(lambda: (tmp_path / "drained").exists())
        for pid in (tmp_path / "up").read_text().split():
            wait_for(lambda pid=pid: not identity(int(pid)))  # type: ignore[misc]
    finally:
        process.kill()
        process.communicate(timeout=100)


def test_the_shell_is_replaced_by_the_service() -> None:
    from kbrl_async.cli.launch import python_service

    assert python_service("broker").startswith("exec ")
    assert python_service("broker").endswith(" -m services.broker")
    assert os.path.isabs(python_service("broker").split()[1])


def test_that_a_process_is_killed_is_said_once() -> None:
    shown = io.StringIO()
    printer = launch.RunPrinter(shown)
    for name in ("learner", "learner", "sampler"):
        killed = Message(
            type="line", data=f"sending SIGKILL to {name}\n", time=datetime.now(UTC), name="system", colour=None
        )
        printer.write(killed)
    assert [shown.getvalue().count(name) for name in ("learner", "sampler")] == [1, 1]


def test_a_full_disk_loses_lines_and_not_the_run(tmp_path: Path) -> None:
    script = f"echo a; echo b; sleep 0.5; echo c; touch {tmp_path}/done; exit 4"
    with open("/dev/full", "w") as full:
        process = spoiled(tmp_path, "", full, learner=script, broker=FOREVER)
        _, errors = said(process)
    assert (process.returncode, errors) == (4, "")
    assert (tmp_path / "done").exists()


def test_a_character_that_can_not_be_shown_is_replaced(tmp_path: Path) -> None:
    latin = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    process = spoiled(tmp_path, "", subprocess.PIPE, latin, learner="echo 'a → b'; exit 4", broker=FOREVER)
    out, errors = said(process)
    assert (process.returncode, errors) == (4, "")
    assert "| a ? b" in out


@pytest.mark.parametrize("raised", [OSError(5, "EIO"), BlockingIOError(11, "EAGAIN"), RuntimeError("reentrant call")])
def test_what_an_output_raises_loses_one_line(raised: Exception) -> None:
    class Output(io.StringIO):
        broken = True

        def flush(self) -> None:
            if self.broken:
                raise raised

    shown = Output()
    printer = launch.RunPrinter(shown)
    line = Message(type="line", data=b"one\n", time=datetime.now(UTC), name="learner", colour=None)
    printer.write(line)
    assert printer.lost
    shown.broken = False
    printer.write(line._replace(data=b"two\n"))
    assert shown.getvalue().endswith("two\n")


def test_an_error_of_ours_leaves_nothing_running(tmp_path: Path) -> None:
    ignores = f"trap '' TERM; echo $$ > {tmp_path}/stubborn; {FOREVER}"
    late = f"echo $$ > {tmp_path}/polite; until [ -e {tmp_path}/stubborn ]; do sleep 0.02; done; echo now; {FOREVER}"
    process = spoiled(tmp_path, RAISES, subprocess.PIPE, learner=late, broker=ignores)
    _, errors = said(process)
    assert process.returncode == 1
    assert "ZeroDivisionError" in errors
    for name in ("polite", "stubborn"):
        pid = int((tmp_path / name).read_text())
        wait_for(lambda pid=pid: not identity(pid))  # type: ignore[misc]


def test_a_process_that_can_not_be_started_ends_the_run(tmp_path: Path) -> None:
    process = spoiled(tmp_path, NOT_STARTED, subprocess.PIPE, broker=FOREVER, learner=FOREVER)
    _, errors = said(process)
    assert process.returncode == 1
    assert "learner could not be started" in errors


def test_a_start_that_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "START_S", 0.2)
    manager = launch.RunManager(io.StringIO())
    manager.add_process("learner", FOREVER)
    before = set(threading.enumerate())
    manager.terminate()
    try:
        assert all(thread.daemon for thread in set(threading.enumerate()) - before)
        wait_for(lambda: set(threading.enumerate()) <= before)
    finally:
        manager._terminating = True  # a timer that would go on for ever ends here
    with pytest.raises(launch.RunError, match="learner could not be started"):
        manager._all_started()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def line_of(name: str, text: str) -> Message:
    return Message(
        type="line", data=f"{text}\n".encode(), time=datetime(2026, 1, 1, 12, 34, 56), name=name, colour=None
    )


def test_a_terminal_has_a_last_line_that_is_replaced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REFRESH_S", 0.0)
    shown = Terminal()
    printer = launch.RunPrinter(shown)
    printer.status = lambda width: f"training, {width} wide"
    printer.write(line_of("sampler", "careful"))
    printer.write(line_of("reward_aggregator", "» update 3/14"))
    printer.refresh()
    printer.close()
    status = "training, 79 wide"
    erased = f"{status}{launch.ERASE}"
    assert shown.getvalue() == f"12:34:56 sampler | careful\n{erased}12:34:56 update 3/14\n{erased}{erased}"


def test_without_a_terminal_there_is_no_status_line(tmp_path: Path) -> None:
    out = finished(start(tmp_path, sampler='sleep 1; echo "status $KBRL_STATUS_LINE."'))
    assert "status ." in out
    assert "starting the processes" not in out
    assert "\x1b" not in out


def test_the_status_line_says_phase_share_and_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    now = [1000.0]
    line = launch.StatusLine(tmp_path, lambda: now[0])
    now[0] += 12
    assert line(79) == "starting the processes  12s"
    Reporter(tmp_path, Log(), lambda: now[0]).tell(progress.TRAINING, "update 7 of 14", 0.5, limit_s=130.0)
    now[0] += 5
    assert line(79) == "training  update 7 of 14  ━━━━━─────  2m 05s left"
    assert line(20) == "training  update 7 o"
