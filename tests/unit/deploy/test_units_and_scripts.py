"""Unit files, batch scripts, cloud tasks and the Containerfile: their own linters where these are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from services.runtime.nanny import FINAL_CODES, STOP_GRACE_S
from tests.unit.deploy.reading import DEPLOY

UNITS = sorted([*DEPLOY.glob("*.service"), *DEPLOY.glob("*.target")])
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))
HOST = DEPLOY / "cloud" / "host.sh"
TASKS = sorted((DEPLOY / "skypilot").glob("*.yaml"))
services = pytest.mark.parametrize("unit", [u for u in UNITS if u.suffix == ".service"], ids=lambda unit: unit.name)


def installed(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(tool), reason=f"{tool} is not installed")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


@installed("systemd-analyze")
def test_systemd_understands_every_unit(tmp_path: Path) -> None:
    instances = []
    for unit in UNITS:  # what they start is not installed here
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        text = text.replace("User=kbrl", "User=root").replace("EnvironmentFile=", "EnvironmentFile=-")
        name = tmp_path / unit.name.replace("@.", "@bench.")
        name.write_text(text)
        instances.append(name)
    assert run("systemd-analyze", "verify", *instances) == ""


@services
def test_a_unit_lets_its_nanny_end_the_child(unit: Path) -> None:
    found = settings(unit)
    assert found["KillMode"] == ["mixed"]
    assert float(found["TimeoutStopSec"][0]) > 2 * STOP_GRACE_S


@services
def test_a_unit_is_not_started_again_where_somebody_must_act(unit: Path) -> None:
    codes = {int(code) for code in settings(unit)["RestartPreventExitStatus"][0].split()}
    assert codes == FINAL_CODES - {0}


@services
def test_a_unit_forbids_nothing_that_the_sandbox_needs(unit: Path) -> None:
    harmful = {"RestrictNamespaces", "SystemCallFilter", "ProtectKernelTunables", "MemoryDenyWriteExecute",
               "PrivateUsers", "ProtectProc", "ProcSubset", "RestrictSUIDSGID", "PrivateDevices"}  # fmt: skip
    assert harmful & set(settings(unit)) == set()


@installed("shellcheck")
def test_the_batch_scripts_pass_shellcheck() -> None:
    assert run("shellcheck", *SCRIPTS, HOST) == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_batch_script_parses_and_its_options_are_slurms(script: Path) -> None:
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", script.read_text(), re.MULTILINE)
    known = {"job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "signal",
             "open-mode", "requeue"}  # fmt: skip
    assert options
    assert set(options) <= known
    assert run("bash", "-n", script) == ""


def test_the_script_for_a_rented_host_checks_before_it_starts_and_its_extras_exist() -> None:
    text = HOST.read_text()
    assert run("bash", "-n", HOST) == ""
    assert text.index("--dry-run") < text.index("setsid nohup")
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    wanted = re.search(r"EXTRAS:-([\w,-]+)", text)
    assert wanted is not None
    assert set(wanted[1].split(",")) <= project["optional-dependencies"].keys()
    assert (DEPLOY.parent / "configs/gpu.yaml").is_file()


def test_the_allocation_outlives_the_drain() -> None:
    text = (DEPLOY / "slurm" / "run.sbatch").read_text()
    signal = re.search(r"--signal=B:TERM@(\d+)", text)
    assert signal is not None
    assert int(signal[1]) > 2 * STOP_GRACE_S
    assert "trap 'kill -TERM" in text


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_cloud_task_has_the_parts_of_one(task: Path) -> None:
    found = yaml.safe_load(task.read_text())
    assert set(found) <= {"name", "workdir", "resources", "envs", "file_mounts", "setup", "run"}
    used = set(re.findall(r"\$\{?([A-Z]{3,})\b", found["setup"] + found["run"])) - {"PATH"}
    assert used <= set(found["envs"])
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [*re.findall(r"\.\[([\w,-]+)\]", found["setup"]), found["envs"].get("EXTRAS", "")]
    assert {name for group in named for name in group.split(",") if name} <= set(extras)


def test_a_worker_in_the_cloud_that_samples_has_vllm_and_settings_of_its_own() -> None:
    found = yaml.safe_load((DEPLOY / "skypilot" / "worker.yaml").read_text())
    assert "[ \"$KIND\" != sample ] || .venv/bin/pip install --quiet '.[vllm]'" in found["setup"]
    assert found["run"].rstrip().endswith("$SETTINGS"), "how many GPUs it has is its host's to say"
    assert "sampler" in yaml.safe_load((DEPLOY / "skypilot" / "run.yaml").read_text())["setup"], "a key for it"


@installed("hadolint")
def test_the_containerfile_passes_hadolint() -> None:
    assert run("hadolint", DEPLOY / "Containerfile") == ""
