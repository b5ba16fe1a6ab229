"""`kbrl worker`: what it makes before it becomes the service, and what it refuses."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kbrl_async import cli
from kbrl_async.cli import worker
from kbrl_async.config import load_run
from kbrl_async.errors import UserError
from kbrl_async.keyring import Keyring
from protocols.auth import Role

REMOTE = "tcp://10.0.0.1:5756"


def arguments(tmp_path: Path, *words: str) -> argparse.Namespace:
    return cli.parse(["worker", *words, f"cache_path={tmp_path / 'cache'}"])


def issued(tmp_path: Path, role: Role) -> str:
    return str(Keyring(tmp_path / "keys").new(role, "host7"))


def test_it_gets_a_folder_of_its_own_with_the_brokers_address(tmp_path: Path) -> None:
    keys = issued(tmp_path, Role.BENCH)
    variables = worker.prepare(arguments(tmp_path, "bench", "--connect", REMOTE, "--keys", keys, "backend=triton"))
    config = load_run(variables["KBRL_RUN_DIR"])
    assert Path(variables["KBRL_RUN_DIR"]).is_relative_to(tmp_path / "cache" / "workers")
    assert (config.broker.work, config.backend) == (REMOTE, "triton")
    assert variables["KBRL_KEYS"] == keys
    assert variables["KBRL_WORKER_APART"] == "1"


def test_nothing_of_the_runs_of_this_host_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    worker.prepare(arguments(tmp_path, "compile", "--connect", "tcp://127.0.0.1:5756"))
    assert not (tmp_path / "runs").exists()


def test_the_same_worker_finds_its_folder_again_and_another_gets_another(tmp_path: Path) -> None:
    words = ("bench", "--connect", "tcp://127.0.0.1:5756")
    folders = [worker.prepare(arguments(tmp_path, *words))["KBRL_RUN_DIR"] for _ in range(2)]
    second = worker.prepare(arguments(tmp_path, *words, "--number", "2"))["KBRL_RUN_DIR"]
    assert folders[0] == folders[1] != second
    assert load_run(second).processes.timing_bench == 2


def test_another_host_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kbrl keys new bench --name NAME"):
        worker.prepare(arguments(tmp_path, "bench", "--connect", REMOTE))


def test_the_key_must_be_of_the_workers_role(tmp_path: Path) -> None:
    keys = issued(tmp_path, Role.COMPILE)
    with pytest.raises(UserError, match="key of role compile, and this worker is a bench"):
        worker.prepare(arguments(tmp_path, "bench", "--connect", REMOTE, "--keys", keys))


def test_a_sampler_needs_the_policies_and_finds_them_where_it_looks(tmp_path: Path) -> None:
    keys = issued(tmp_path, Role.SAMPLER)
    words = ("sample", "--connect", REMOTE, "--keys", keys)
    with pytest.raises(UserError, match="--policies FOLDER"):
        worker.prepare(arguments(tmp_path, *words))
    (tmp_path / "shared").mkdir()
    folder = worker.prepare(arguments(tmp_path, *words, "--policies", str(tmp_path / "shared")))["KBRL_RUN_DIR"]
    assert (Path(folder) / "policies").resolve() == tmp_path / "shared"
