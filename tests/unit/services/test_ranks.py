"""A rank of the learner that is killed, and what a launcher must have started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import structlog

from kbrl_async.errors import ConfigError
from protocols.records import TrainGroup, TrainSample
from services.learner import ranks
from tests.unit.services import two_ranks

pytestmark = pytest.mark.timeout(900)

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def groups() -> list[TrainGroup]:
    samples = [TrainSample(f"g{i}", [5, 6], [7, 8 + i], [-4.0, -4.0], 0.5 - i, 0.5, 0) for i in range(2)]
    return [TrainGroup("g", "p", 1, samples)]


def wait_for(path: Path, nanny: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert nanny.poll() is None, "the learner has ended"
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.05)


def is_there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_killed_rank_ends_all_and_training_goes_on_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "groups.json").write_bytes(msgspec.json.encode(groups()))
    environment = {**os.environ, "TWO_RANKS": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    nanny = subprocess.Popen([sys.executable, "-m", two_ranks.MODULE], env=environment, text=True)
    try:
        wait_for(tmp_path / "checkpoints" / f"step-{two_ranks.KILL_AFTER:06d}" / "COMPLETE", nanny)
        (lost,) = json.loads((tmp_path / "lives.jsonl").read_text())["ranks"]
        os.kill(lost, signal.SIGKILL)
        (tmp_path / "killed").touch()
        assert nanny.wait(300) == 0
    finally:
        nanny.kill()
        nanny.wait()
    lives = [json.loads(line) for line in (tmp_path / "lives.jsonl").read_text().splitlines()]
    assert [life["from"] for life in lives] == [0, two_ranks.KILL_AFTER]
    assert not any(is_there(pid) for life in lives for pid in life["ranks"])
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "groups.json").write_bytes(msgspec.json.encode(groups()))
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    two_ranks.train(alone, [])
    never_stopped, found = (json.loads((place / "weights.json").read_text()) for place in (alone, tmp_path))
    assert found == pytest.approx(never_stopped, rel=1e-3)


def test_a_launcher_must_start_as_many_ranks_as_the_run_says() -> None:
    ranks.check_launcher(2, LAUNCHED)
    with pytest.raises(ConfigError, match=r"has started 2 ranks, and learner.processes=1.*learner.processes=2"):
        ranks.check_launcher(1, LAUNCHED)


def test_a_rank_without_its_team_is_refused_by_name() -> None:
    ranks.check_launcher(4, {})
    with pytest.raises(ConfigError, match=r"RANK is set and WORLD_SIZE, LOCAL_RANK.*torchrun"):
        ranks.check_launcher(1, {"RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"})


class Ended(Exception):  # noqa: N818 - stands for the end of the process
    pass


def test_rank_0_does_not_outlive_another_even_while_it_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(ranks, "LOOK_S", 0.01)
    monkeypatch.setattr(os, "_exit", end)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other.kill()
    with pytest.raises(Ended, match=str(ranks.LOST)):
        asyncio.run(asyncio.wait_for(ranks.watch([other], structlog.get_logger()), 60))
