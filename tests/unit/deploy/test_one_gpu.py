"""A whole run in one pod: what the others' pods must be, it is too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kbrl_async import cli
from kbrl_async.runs.config import load
from kbrl_async.runs.config.placement import wanted
from services.runtime.nanny import FINAL_CODES
from tests.unit.deploy.reading import BASE, DEPLOY, kustomized

FOLDER = DEPLOY / "kubernetes" / "one-gpu"
OBJECTS = {found["kind"]: found for found in yaml.safe_load_all((FOLDER / "job.yaml").read_text())}
JOB = OBJECTS["Job"]["spec"]
POD = JOB["template"]["spec"]
MAIN = POD["containers"][0]
MOUNTS = {mount["mountPath"]: mount["name"] for mount in MAIN["volumeMounts"]}


def test_it_is_hardened_as_every_pod_is() -> None:
    hardening = yaml.safe_load((BASE / "hardening.yaml").read_text())["spec"]["template"]["spec"]
    assert {key: POD[key] for key in hardening} == hardening
    assert MAIN["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    labels = OBJECTS["Namespace"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert OBJECTS["NetworkPolicy"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_its_settings_fit_its_gpu_and_its_volumes() -> None:
    config = load([FOLDER / "run.yaml"])
    assert wanted(config) == MAIN["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert config.lora_rank
    assert MOUNTS[str(Path(config.log_path).parent)] == "run"
    assert str(Path(config.model_name).parent) in MOUNTS
    assert set(MOUNTS.values()) == {volume["name"] for volume in POD["volumes"]}


def test_its_command_is_one_that_kbrl_takes_and_names_the_mounted_settings() -> None:
    words = MAIN["command"]
    args = cli.parse(words[words.index("kbrl") + 1 :])
    assert args.command == "train"
    assert MOUNTS[str(args.config[0].parent)] == "settings"
    assert kustomized(FOLDER)["configMapGenerator"][0]["files"] == [args.config[0].name]


def test_it_is_not_started_again_where_somebody_must_act() -> None:
    rules = JOB["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "FailJob"
    assert set(rules[0]["onExitCodes"]["values"]) == FINAL_CODES - {0}
    assert POD["restartPolicy"] == "Never", "as such rules ask"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl, which renders it, is not installed")
def test_it_renders() -> None:
    done = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = {found["kind"]: found for found in yaml.safe_load_all(done.stdout)}
    assert set(rendered) == {*OBJECTS, "ConfigMap"}
    spec = rendered["Job"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"].startswith("registry.example.org/")
    assert {"settings": rendered["ConfigMap"]["metadata"]["name"]} == {
        volume["name"]: volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume
    }
