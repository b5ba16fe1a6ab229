"""Clocks with a GPU that is a file: nothing here touches a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import ConfigError, HostError
from kbrl_async.kernels.timing.cuda.clocks import (
    ClockLock,
    Note,
    held,
    is_slow,
    note_path,
    observe,
    physical_index,
    restore_notes,
    sustainable,
)
from kbrl_async.kernels.timing.cuda.nvml import is_rejected, opened, throttle_names
from kbrl_async.kernels.timing.device import timed_device
from kbrl_async.lineage import identity
from services.runtime.nanny import Nanny
from tests.unit.kernels.timing.fake_nvml import FACTORY, state

HOLDER = """
import sys, time
from pathlib import Path
from kbrl_async.kernels.timing.cuda.clocks import ClockLock
with ClockLock(0, Path(sys.argv[1]), lambda: None, factory=sys.argv[2]) as lock:
    print(lock.mhz, flush=True)
    time.sleep(300)
"""


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpu.json"
    monkeypatch.setenv("FAKE_NVML", str(path))
    put(path)
    return path


def put(path: Path, **changes: Any) -> None:
    fresh = {"locked": None, "sustained": 1800, "free_runs": 1800, "boost": 1980, "right": True, "bits": 0, "calls": []}
    path.write_text(json.dumps({**fresh, **changes}))


def locking(folder: Path) -> ClockLock:
    return ClockLock(0, folder, lambda: None, factory=FACTORY)


def test_the_highest_clock_that_the_gpu_sustains_is_locked_and_restored(tmp_path: Path) -> None:
    with locking(tmp_path) as lock:
        assert (lock.mhz, state()["locked"]) == (1755, 1755)
        assert note_path(tmp_path, 0).exists()
    assert state()["locked"] is None
    assert not note_path(tmp_path, 0).exists()


def test_a_clock_that_is_not_held_under_load_is_lowered(tmp_path: Path, gpu: Path) -> None:
    put(gpu, free_runs=1980, sustained=1510)
    with locking(tmp_path) as lock:
        assert lock.mhz == 1500
    assert state()["calls"] == ["lock 1980", "lock 1500", "unlock"]


def test_a_gpu_that_holds_nothing_is_left_as_it_was(tmp_path: Path, gpu: Path) -> None:
    put(gpu, free_runs=1980, sustained=200)
    with pytest.raises(HostError, match="holds none"), locking(tmp_path):
        pass
    assert state()["locked"] is None
    assert not note_path(tmp_path, 0).exists()


def test_an_error_inside_restores(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locking(tmp_path):
        raise ZeroDivisionError
    assert state()["locked"] is None


def test_without_the_right_it_is_refused_with_its_cure_and_nothing_is_left(tmp_path: Path, gpu: Path) -> None:
    put(gpu, right=False)
    with pytest.raises(HostError, match="may not lock"), locking(tmp_path):
        pass
    assert state()["calls"] == []


def test_observing_changes_nothing() -> None:
    assert observe(opened(FACTORY, 0)).mhz == 1800
    assert state()["calls"] == []


def hold(tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", HOLDER, str(tmp_path), FACTORY]
    holder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "1755\n"
    return holder


def until_free(deadline_s: float = 60.0) -> bool:
    end = time.monotonic() + deadline_s
    while state()["locked"] is not None and time.monotonic() < end:
        time.sleep(0.02)
    return state()["locked"] is None


def test_kill_nine_restores(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        assert state()["locked"] == 1755
        holder.send_signal(signal.SIGKILL)
    assert until_free()


def test_who_finds_the_note_of_a_dead_owner_restores_too(tmp_path: Path, gpu: Path) -> None:
    put(gpu, locked=1755)
    note_path(tmp_path, 0).write_text(f'{{"index": 0, "uuid": "GPU-0", "pid": {2**22 - 1}, "mhz": 1755}}')
    assert restore_notes(tmp_path, FACTORY) == [0]
    assert restore_notes(tmp_path, FACTORY) == []
    assert state()["locked"] is None


def test_the_note_of_somebody_who_lives_is_left_alone(tmp_path: Path, gpu: Path) -> None:
    put(gpu, locked=1755)
    note_path(tmp_path, 0).write_text(f'{{"index": 0, "uuid": "GPU-0", "pid": {os.getppid()}, "mhz": 1755}}')
    assert restore_notes(tmp_path, FACTORY) == []
    assert state()["locked"] == 1755


def test_a_pid_that_is_somebody_elses_now_holds_nothing(tmp_path: Path, gpu: Path) -> None:
    """A container that was started again: the pid of the note lives, and never heard of the clock."""
    put(gpu, locked=1755)
    other = Note(0, "GPU-0", os.getppid(), 1755, f"{os.getppid()}:1")
    note_path(tmp_path, 0).write_bytes(msgspec.json.encode(other))
    with locking(tmp_path) as lock:
        assert lock.mhz == 1755
    assert state()["calls"] == ["unlock", "lock 1755", "unlock"]


def test_a_note_names_its_owner_and_is_left_alone_while_that_lives(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        note = msgspec.json.decode(note_path(tmp_path, 0).read_bytes(), type=Note)
        owner = identity(holder.pid)
        restored = restore_notes(tmp_path, FACTORY)
        holder.terminate()
    assert (note.pid, note.owner) == (holder.pid, owner)
    assert restored == []
    assert until_free()


def test_a_nanny_restores_what_its_child_left_locked(tmp_path: Path, gpu: Path) -> None:
    put(gpu, locked=1755)
    leave = f'import os; open({str(note_path(tmp_path, 0))!r}, \'w\').write(\'{{"index": 0, "uuid": "", "pid": %d, "mhz": 1755}}\' % os.getpid()); os.kill(os.getpid(), 9)'  # noqa: E501 - one line of Python for -c
    nanny = Nanny(
        "demo",
        [sys.executable, "-S", "-c", leave],
        max_crashes=1,
        on_end=lambda: restore_notes(tmp_path, FACTORY),
    )
    nanny.run()
    assert state()["locked"] is None


@pytest.mark.parametrize(("sustained", "chosen"), [(1980, 1980), (1979, 1965), (345, 345), (100, None)])
def test_a_sustainable_clock_is_never_above_what_was_seen(sustained: int, chosen: int | None) -> None:
    assert sustainable([345, 1965, 1980], sustained) == chosen


def test_reasons_to_throttle_have_names_and_some_reject_a_sample() -> None:
    assert throttle_names(0x1 | 0x20 | 0x80) == ["GpuIdle", "SwThermal", "PowerBrake"]
    assert throttle_names(0x8000) == ["0x8000"]
    assert [is_rejected(bit) for bit in (0x0, 0x1, 0x2, 0x4, 0x8, 0x20, 0x40, 0x80)] == [False] * 3 + [True] * 5


def test_samples_under_three_quarters_of_the_expected_clock_go() -> None:
    assert [is_slow(mhz, 1980) for mhz in (1980, 1486, 1484, 345)] == [False, False, True, True]
    assert not is_slow(None, 1980)
    assert not is_slow(345, None)


@pytest.mark.parametrize(
    ("device", "visible", "index"), [("cuda:1", "", 1), ("cuda", "", 0), ("cuda:0", "3", 3), ("cuda:1", "4, 7", 7)]
)
def test_the_drivers_number_of_a_gpu_is_not_cudas(device: str, visible: str, index: int) -> None:
    assert physical_index(device, {"CUDA_VISIBLE_DEVICES": visible}) == index


@pytest.mark.parametrize("visible", ["GPU-8f2", "0"])
def test_a_gpu_without_a_number_is_not_locked(visible: str) -> None:
    with pytest.raises(ConfigError):
        physical_index("cuda:1", {"CUDA_VISIBLE_DEVICES": visible})


def test_a_bench_that_observes_holds_nothing_and_one_without_a_gpu_can_not_lock(tmp_path: Path) -> None:
    with held("observe", "cuda:0", tmp_path, factory=FACTORY) as mhz:
        assert mhz is None
    with pytest.raises(ConfigError, match="clocks=lock"), timed_device("cpu").held_clocks("lock", tmp_path):
        pass
    assert state()["calls"] == []


def test_the_clock_of_another_bench_is_not_touched(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        with pytest.raises(HostError, match="another bench"), locking(tmp_path):
            pass
        assert state()["locked"] == 1755
        holder.terminate()
    assert until_free()


def test_a_note_is_whole_or_not_there(tmp_path: Path) -> None:
    note_path(tmp_path, 0).write_text('{"index": 0')
    assert restore_notes(tmp_path, FACTORY) == []
    assert Note(0, "GPU", 1).mhz == 0
