"""A rank of the learner that is killed, and what a launcher must have started."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch
from safetensors.torch import load_file

from kbrl_async.errors import ConfigError
from protocols.records import TrainGroup, TrainSample
from services.learner import ranks
from tests.ports import free_port
from tests.unit.services import killed_ranks

pytestmark = pytest.mark.timeout(900)

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


Weights = dict[str, torch.Tensor]


def groups() -> list[TrainGroup]:
    """A minibatch is half of them: enough for each of four ranks. Prompts differ: `PlainPolicy` knows no trees."""
    answers = [[7 + (3 * i + j) % 50 for j in range(2 + i % 4)] for i in range(8)]
    samples = [TrainSample(f"g{i}", [5, i], a, [-4.0] * len(a), 0.8 - 0.2 * i, 0.5, 0) for i, a in enumerate(answers)]
    return [TrainGroup("g", "p", 1, samples)]


def wait_for(path: Path, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert not any(process.poll() is not None for process in processes), "the learner has ended"
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.05)


def is_there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("alone")
    prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKS", "1")
        for name in LAUNCHED:
            patch.delenv(name, raising=False)
        killed_ranks.train(folder, [])
    return load_file(folder / "weights.safetensors")


Trains = Callable[[int], Weights]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> Trains:
    """Weights that so many ranks train, and nobody kills."""

    @functools.cache
    def trained(count: int) -> Weights:
        folder = tmp_path_factory.mktemp("never-killed")
        (folder / "killed").touch()
        command = [sys.executable, "-m", killed_ranks.MODULE]
        subprocess.run(command, env=prepare(folder, count), timeout=300, check=True)
        assert [life["from"] for life in lives_of(folder)] == [0]
        return load_file(folder / "weights.safetensors")

    return trained


def prepare(folder: Path, count: int = 2) -> dict[str, str]:
    """What `count` ranks need in `folder`, and in their environment."""
    (folder / "groups.json").write_bytes(msgspec.json.encode(groups()))
    mine = {"RANKS_FOLDER": str(folder), "RANKS": str(count), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return {**os.environ, **mine}


def kill(rank: int, folder: Path, *processes: subprocess.Popen[bytes]) -> None:
    """After the second update, whose checkpoint is on disk."""
    wait_for(folder / "checkpoints" / f"step-{killed_ranks.KILL_AFTER:06d}" / "COMPLETE", *processes)
    os.kill(int((folder / f"follower-{rank}").read_text()), signal.SIGKILL)
    (folder / "killed").touch()


def agree(folder: Path, never_killed: Weights, of_one_process: Weights) -> None:
    """As many ranks go on bit by bit, and make what one process makes."""
    found = load_file(folder / "weights.safetensors")
    assert found.keys() == never_killed.keys() == of_one_process.keys()
    for name, weights in found.items():
        assert torch.equal(weights, never_killed[name]), name
        torch.testing.assert_close(weights, of_one_process[name], rtol=1e-3, atol=1e-4, msg=name)


def lives_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lives.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_a_killed_rank_ends_all_and_training_goes_on_bit_by_bit_from_the_checkpoint(
    tmp_path: Path, never_killed: Trains, of_one_process: Weights, count: int
) -> None:
    nanny = subprocess.Popen([sys.executable, "-m", killed_ranks.MODULE], env=prepare(tmp_path, count))
    try:
        kill(count - 1, tmp_path, nanny)
        assert nanny.wait(300) == 0
    finally:
        nanny.kill()
        nanny.wait()
    assert [life["from"] for life in lives_of(tmp_path)] == [0, killed_ranks.KILL_AFTER]
    assert not any(is_there(pid) for life in lives_of(tmp_path) for pid in life["ranks"])
    agree(tmp_path, never_killed(count), of_one_process)


@pytest.mark.long
def test_two_hosts_of_torchrun_start_again_together_when_one_loses_its_rank(
    tmp_path: Path, never_killed: Trains, of_one_process: Weights
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    environment = {**prepare(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    hosts = [subprocess.Popen([*launcher, "-m", killed_ranks.MODULE], env=environment) for _ in range(2)]
    try:
        kill(1, tmp_path, *hosts)
        assert [host.wait(300) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert [life["from"] for life in lives_of(tmp_path)] == [0, killed_ranks.KILL_AFTER]
    agree(tmp_path, never_killed(2), of_one_process)


def test_a_launcher_must_start_as_many_ranks_as_the_run_says() -> None:
    ranks.check_launcher(2, LAUNCHED)
    with pytest.raises(ConfigError, match=r"has started 2 ranks, and learner.processes=1.*learner.processes=2"):
        ranks.check_launcher(1, LAUNCHED)


def test_a_launcher_whose_restarts_would_meet_the_dead_is_refused() -> None:
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        ranks.check_launcher(2, {**LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE": "True"})


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
