"""What would stop a run is found before anything is written, and named with its cure."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kbrl_async.cli import preflight
from kbrl_async.errors import AddressTaken, CheckpointError, ConfigError, DiskFull, MissingTool, ProblemError, UserError
from kbrl_async.runs.config import Config, endpoints, load
from kbrl_async.runs.folder import Run, plan, prepare
from protocols.sockets import BoundRouter


def planned(*overrides: str) -> Run:
    return plan(load(overrides=overrides))


def test_a_good_host_passes_and_is_left_as_it_was(folder: Path) -> None:
    preflight.check(planned("compile_farm.store_max_bytes=1"))
    assert list(folder.iterdir()) == []


def test_a_missing_compiler_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(MissingTool, match=r"gcc was not found.*apt-get install gcc"):
        preflight.check_compiler()


def test_a_compiler_without_openmp_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = folder / "gcc"
    fake.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    with pytest.raises(MissingTool, match=r"cannot build an OpenMP program: fatal error: omp\.h"):
        preflight.check_compiler()


def test_a_full_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2**29))
    with pytest.raises(DiskFull, match=r"0\.5 GiB free, the run needs 2\.0 GiB"):
        preflight.check_disk(folder / "runs/x", 2**31)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot write to /proc"):
        preflight.check_disk(Path("/proc/runs/x"), 0)


def test_a_problem_with_a_syntax_error_is_named_with_its_line(folder: Path) -> None:
    broken = folder / "mine/level1/1_broken.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("class Model:\n    def\n")
    with pytest.raises(ProblemError, match=r"1_broken\.py:2 does not parse"):
        preflight.check_problems(load(overrides=["problems=mine"]))


def test_a_level_without_problems_is_named() -> None:
    with pytest.raises(ProblemError, match="no problem"):
        preflight.check_problems(load(overrides=["level=9"]))


def test_a_folder_without_a_model_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no model, it has no config\.json"):
        preflight.check_policy(load(overrides=[f"model_name={folder}"]))


def test_a_model_folder_and_a_hub_name_pass(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    preflight.check_policy(load(overrides=[f"model_name={folder}"]))
    preflight.check_policy(load(overrides=["model_name=Qwen/Qwen2.5-Coder-0.5B"]))


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="this host lends no core 4095"):
        preflight.check_cores(load(overrides=["cpu.bench=4095"]))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken, match=rf"can't bind tcp://127\.0\.0\.1:{port}"):
            preflight.check_addresses(planned(f"broker.submit=tcp://127.0.0.1:{port}"))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.term()


def test_a_run_that_is_still_going_is_named(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    run = prepare(Config())
    (run.path / "sockets").mkdir()
    broker = BoundRouter(context, endpoints(run.config, run.path).submit)
    try:
        with pytest.raises(AddressTaken, match=r"submit is held by process \d+"):
            preflight.check_addresses(planned())
    finally:
        broker.close()
    preflight.check_addresses(planned())


def test_demonstrations_that_are_not_there_stop_the_run_before_it_begins(tmp_path: Path) -> None:
    there = tmp_path / "data.jsonl"
    there.write_text("{}\n")
    preflight.check_demonstrations(load(overrides=["method=sft", f"demonstrations.files={there}"]))
    with pytest.raises(UserError, match="there is no file of demonstrations"):
        preflight.check_demonstrations(load(overrides=["method=sft", f"demonstrations.files={there},{tmp_path}/no"]))
