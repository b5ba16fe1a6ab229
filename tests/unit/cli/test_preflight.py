"""What would stop a run is found before anything is written, and named with its cure."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kbrl_async.cli import preflight
from kbrl_async.errors import (
    AddressTaken,
    CheckpointError,
    ConfigError,
    DiskFull,
    HostError,
    KbrlError,
    MissingTool,
    ProblemError,
    UserError,
)
from kbrl_async.kernels.backends.triton.build import BACKEND as TRITON
from kbrl_async.runs.config import Config, endpoints, load
from kbrl_async.runs.config.placement import Gpu
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


def test_checkpoints_that_the_disk_can_not_hold_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all weights of eight billion and their moments each is 98 GB: a disk of 252 was full at the third."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=200 * 10**9))
    wish = ["model_name=Qwen3-8B", "lora_rank=0", "device=cuda", "max_steps=20", "compile_farm.store_max_bytes=1"]
    with pytest.raises(DiskFull, match=r"186\.3 GiB free, the run with its checkpoints of 295 GB needs 275\.6") as told:
        preflight.check_host(planned(*wish), starts_here=False)
    assert "learner.checkpoint_every" in told.value.cure
    preflight.check_host(planned(*wish, "learner.checkpoint_every=50"), starts_here=False)
    preflight.check_host(planned(*wish, "lora_rank=32"), starts_here=False)


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


@pytest.mark.parametrize(
    ("named", "cure"),
    [
        ("runs/defualt", "Did you mean model_name=runs/default"),
        ("./runs/defualt", "Did you mean model_name=runs/default"),
        ("runs/default/policies/policy-v9", "'kbrl runs' lists"),
    ],
)
def test_a_run_that_is_not_there_is_no_hub_name(folder: Path, named: str, cure: str) -> None:
    (folder / "runs/default").mkdir(parents=True)
    (folder / "runs/default/config.yaml").write_text("seed: 0\n")
    with pytest.raises(CheckpointError, match="there is no run") as refused:
        preflight.check_policy(load(overrides=[f"model_name={named}"]))
    assert cure in str(refused.value)


def test_an_answer_that_is_longer_than_the_model_has_positions_is_refused() -> None:
    fits = load(overrides=["model_name=Qwen2.5-0.5B", "max_tokens=32767"])
    preflight.check_length(fits)
    preflight.check_length(load(overrides=["max_tokens=1000000"]))
    with pytest.raises(ConfigError, match="max_tokens=32768 leaves no room in the 32768 positions"):
        preflight.check(planned("model_name=Qwen2.5-0.5B", "max_tokens=32768"))


def test_a_model_folder_and_a_hub_name_pass(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    preflight.check_policy(load(overrides=[f"model_name={folder}"]))
    preflight.check_policy(load(overrides=["model_name=Qwen/Qwen2.5-Coder-0.5B"]))


def test_the_small_policy_is_no_missing_run_where_one_works_below_log_path(folder: Path) -> None:
    preflight.check_policy(load(overrides=["model_name=small", f"log_path={folder.parent}"]))


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("htp://store/policies", "Protocol not known: htp"),
        ("memory", ""),
        ("memory://policies", ""),
        ("file:///proc/nowhere", "cannot write to /proc"),
        ("/proc/nowhere", "cannot write to /proc"),
    ],
)
def test_versions_can_be_uploaded_to_where_they_shall(folder: Path, url: str, cause: str) -> None:
    with pytest.raises(KbrlError, match=cause) if cause else contextlib.nullcontext():
        preflight.check(planned(f"policy_url={url}"))


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
    preflight.check_files(load(overrides=["method=sft", f"demonstrations.files={there}"]))
    with pytest.raises(UserError, match="there is no file of demonstrations"):
        preflight.check_files(load(overrides=["method=sft", f"demonstrations.files={there},{tmp_path}/no"]))


GPU = Gpu("0", "NVIDIA H200", 140.0, "GPU-1")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["device=cuda"], "device=cuda: this host has no GPU"),
        (["backend=cuda"], "backend=cuda, which a bench times on a GPU: this host has no GPU"),
        (["backend=cuda", "device=cpu"], "backend=cuda, which a bench times on a GPU: this host has no GPU"),
    ],
)
def test_who_computes_on_a_gpu_has_one(words: list[str], cause: str) -> None:
    with pytest.raises(HostError, match=cause):
        preflight.check_devices(load(overrides=words), [])


def test_a_bench_on_a_cpu_times_no_kernels_for_gpus() -> None:
    with pytest.raises(ConfigError, match="kernels of backend=cuda run on a GPU"):
        preflight.check_devices(load(overrides=["backend=cuda", "timing_bench.device=cpu"]), [GPU])


def test_a_gpu_needs_a_pytorch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2.13.0+cpu")
    with pytest.raises(MissingTool, match="computes on CPUs only"):
        preflight.check_devices(load(overrides=["device=cuda"]), [GPU])
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2.13.0")
    preflight.check_devices(load(overrides=["device=cuda"]), [GPU])


@pytest.mark.parametrize("words", [[], ["device=cpu", "backend=triton"]])
def test_who_computes_on_cpus_or_elsewhere_needs_no_gpu_here(words: list[str]) -> None:
    preflight.check_devices(load(overrides=words), [])


def test_a_farm_needs_what_it_builds_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRITON.__class__, "missing", lambda _self: "triton is not installed: pip install it")
    with pytest.raises(MissingTool, match="backend=triton: triton is not installed"):
        preflight.check_backend(load(overrides=["backend=triton"]))


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["prompt.option=raicl", "prompt.index=no"], "no holds no index"),
        (["prompt.option=custom", "prompt.file=no"], "there is no file no"),
    ],
)
def test_files_that_a_configuration_names_are_there(folder: Path, words: list[str], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        preflight.check_files(load(overrides=words))


def test_libraries_that_a_setting_needs_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    preflight.check_extras(load())
    with pytest.raises(MissingTool, match="pip install bitsandbytes"):
        preflight.check_extras(load(overrides=["learner.base_quantisation=nf4", "lora_rank=8"]))


def test_the_cache_must_be_open_to_us(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write to /proc.*Set cache_path="):
        preflight.check(planned("cache_path=/proc/x", "compile_farm.store_max_bytes=1"))


def test_a_host_that_only_prepares_needs_no_gpu(folder: Path) -> None:
    todo = planned("device=cuda", "compile_farm.store_max_bytes=1")
    preflight.check(todo, starts_here=False)
    with pytest.raises(HostError):
        preflight.check(todo)
