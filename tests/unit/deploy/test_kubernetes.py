"""The objects fit together, fit the code, and pods of the strictest level still hold the sandbox."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kbrl_async.kernels.sandbox import linux
from kbrl_async.runs.config import SERVICES, load
from kbrl_async.runs.telemetry.prometheus import port_of, status_families
from protocols.auth import PeerLimits
from protocols.messages import Stage, StageStanding, StatusReport
from services.runtime.nanny import STOP_GRACE_S
from tests.unit.deploy.reading import BASE, DEPLOY, OVERLAYS, Object, containers, kustomized, objects, pod, workloads

HARDENING = yaml.safe_load((BASE / "hardening.yaml").read_text())["spec"]["template"]["spec"]
SECCOMP = DEPLOY / "kubernetes" / "profiles" / "kbrl-sandbox.json"
PORTS = {"broker": "broker", "aggregator": "reward_aggregator", "learner": "learner", "sampler": "sampler",
         "compile": "compile_farm", "bench": "timing_bench", "verifier": "verifier"}  # fmt: skip
KINDS = ("StatefulSet", "Deployment")
ON_GPUS = {"gpu": {"learner": 1, "sampler": 1, "bench": 1, "verifier": 1},
           "sharded": {"learner": 2, "sampler": 2, "bench": 1, "verifier": 1}}  # fmt: skip
"""How many each role has in the overlays that have any."""
each = pytest.mark.parametrize("workload", workloads(), ids=lambda found: found["metadata"]["name"])


def role(workload: Object) -> str:
    return str(workload["metadata"]["name"])


def scaled() -> list[Object]:
    path = DEPLOY / "kubernetes" / "components" / "autoscaling" / "scaledobjects.yaml"
    return list(yaml.safe_load_all(path.read_text()))


def named(kind: str) -> dict[str, Object]:
    return {found["metadata"]["name"]: found for found in objects() if found["kind"] == kind}


def denied() -> set[str]:
    profile = json.loads(SECCOMP.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    return {name for rule in profile["syscalls"] for name in rule["names"]}


def test_every_role_of_a_run_has_its_workload() -> None:
    kinds = {role(found): found["kind"] for found in workloads()}
    assert kinds == {"broker": "StatefulSet", "aggregator": "StatefulSet", "learner": "StatefulSet",
                     "sampler": "Deployment", "compile": "Deployment", "bench": "Deployment",
                     "verifier": "Deployment"}  # fmt: skip


@each
def test_a_workload_selects_its_own_pods(workload: Object) -> None:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == {"kbrl/role": role(workload)}
    assert labels["kbrl/role"] == role(workload)


@each
def test_what_a_container_mounts_is_a_volume_of_its_pod(workload: Object) -> None:
    claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    volumes = {volume["name"] for volume in pod(workload)["volumes"]} | claims
    mounted = {mount["name"] for container in containers(workload) for mount in container["volumeMounts"]}
    assert mounted == volumes


@each
def test_what_a_pod_refers_to_is_made_by_somebody(workload: Object) -> None:
    broker = named("StatefulSet")["broker"]
    claims = {f"{claim['metadata']['name']}-broker-0" for claim in broker["spec"]["volumeClaimTemplates"]}
    maps = {made["name"] for made in kustomized(BASE)["configMapGenerator"]}
    for volume in pod(workload)["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
        if "configMap" in volume:
            assert volume["configMap"]["name"] in maps
        if "secret" in volume:
            assert volume["secret"]["secretName"] == f"kbrl-keys-{role(workload)}"
    if workload["kind"] == "StatefulSet":
        assert workload["spec"]["serviceName"] in named("Service")


def test_the_journal_is_on_a_volume_of_the_brokers_own() -> None:
    broker = named("StatefulSet")["broker"]
    config = load([BASE / "run.yaml"])
    mounts = {mount["name"]: mount["mountPath"] for mount in containers(broker)[-1]["volumeMounts"]}
    assert broker["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "run"
    assert Path(config.log_path).is_relative_to(mounts["run"])
    assert Path(config.broker.keys or "").is_relative_to(mounts["run"])


@each
def test_who_mounts_the_runs_volume_runs_on_the_brokers_node(workload: Object) -> None:
    mounts = any("persistentVolumeClaim" in volume for volume in pod(workload)["volumes"])
    terms = (
        pod(workload).get("affinity", {}).get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    )
    assert mounts == bool(terms)
    for term in terms or []:
        assert (term["topologyKey"], term["labelSelector"]["matchLabels"]) == (
            "kubernetes.io/hostname",
            {"kbrl/role": "broker"},
        )


@each
def test_a_service_of_the_run_finds_its_folder(workload: Object) -> None:
    main = pod(workload)["containers"][0]
    if "services." in " ".join(main["command"]):
        config = load([BASE / "run.yaml"])
        values = {entry["name"]: entry["value"] for entry in main["env"]}
        assert values["KBRL_RUN_DIR"] == f"{config.log_path}/{config.run_name}"
        assert ("KBRL_BROKER_HOST" in values) == (role(workload) != "broker"), "the broker binds, the others connect"
        assert values.get("KBRL_BROKER_HOST", "broker") in named("Service")


@each
def test_the_port_of_the_metrics_is_the_one_that_the_process_takes(workload: Object) -> None:
    base = load([BASE / "run.yaml"]).metrics.prometheus_port
    assert base is not None
    annotated = workload["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"]
    assert int(annotated) == port_of(base, SERVICES.index(PORTS[role(workload)]), 0)
    policy = named("NetworkPolicy")["metrics"]["spec"]["ingress"][0]["ports"][0]
    assert policy["port"] <= int(annotated) <= policy["endPort"]


@each
def test_a_pod_has_time_to_drain(workload: Object) -> None:
    assert HARDENING["terminationGracePeriodSeconds"] > 2 * STOP_GRACE_S
    if role(workload) != "broker":
        hook = pod(workload)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert "kill -TERM 1" in hook[-1]
        assert pod(workload)["containers"][0]["command"][0] == "tini", "what gets the signal must pass it on"


@each
def test_every_pod_is_of_the_restricted_level(workload: Object) -> None:
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "name"}
    assert {key for volume in pod(workload)["volumes"] for key in volume} <= allowed
    for container in containers(workload):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
    assert not {"hostNetwork", "hostPID", "hostIPC"} & {*pod(workload), *HARDENING}
    assert HARDENING["securityContext"]["runAsNonRoot"] is True
    assert HARDENING["securityContext"]["seccompProfile"]["type"] == "Localhost"
    labels = named("Namespace")["kbrl"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_profiles_that_pods_name_are_the_ones_that_are_here() -> None:
    context = HARDENING["securityContext"]
    assert (SECCOMP.parent / context["seccompProfile"]["localhostProfile"]).is_file()
    text = (SECCOMP.parent / "kbrl-sandbox.apparmor").read_text()
    assert f"profile {context['appArmorProfile']['localhostProfile']} " in text
    assert re.search(r"^  mount,$", text, re.MULTILINE)


def test_the_sandbox_makes_no_system_call_that_the_pods_profile_denies() -> None:
    source = Path(linux.__file__).read_text()
    made = {"unshare", "setns", "mount", "mount_setattr", "prctl", "capset", "seccomp", "pidfd_open", "clone", "ptrace"}
    assert {"unshare", "setns", "mount", "prctl"} <= {name for name in made if f"_libc.{name}(" in source}
    assert made & denied() == set()


UNDER_THE_PROFILE = """
import json, os, sys
import pyseccomp as seccomp
from kbrl_async.kernels.sandbox import linux
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
rules = seccomp.SyscallFilter(seccomp.ALLOW)
for name in json.loads(sys.argv[1]):
    try:
        rules.add_rule(seccomp.ERRNO(1), name)
    except OSError:
        pass  # this architecture has no such call
rules.load()
from kbrl_async.kernels.sandbox import Zygote
with Zygote(("kbrl_async.kernels.sandbox.canary",)) as zygote:
    print(json.dumps(zygote.isolation.missing))
"""


def _missing(names: list[str]) -> list[str]:
    """What the sandbox lacks on this host under a filter that denies these calls, and nobody makes namespaces for it:
    bubblewrap, where it is installed, calls `clone` instead of `unshare`.
    """
    command = [sys.executable, "-c", UNDER_THE_PROFILE, json.dumps(names)]
    environment = {**os.environ, "PATH": "", "PYTHONPATH": str(DEPLOY.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_sandbox_lacks_nothing_under_the_pods_profile_that_this_host_has() -> None:
    assert _missing(sorted(denied())) == _missing([])


def test_without_unshare_the_sandbox_would_lack_its_namespaces() -> None:
    assert "user namespace" in _missing([*sorted(denied()), "unshare"])


@pytest.mark.parametrize("found", scaled(), ids=lambda found: found["metadata"]["name"])
def test_scaling_asks_for_a_metric_that_the_broker_serves(found: Object) -> None:
    query = found["spec"]["triggers"][0]["metadata"]["query"]
    stage = found["metadata"]["name"]
    wanted = re.search(r"(kbrl_\w+)\{stage=\"(\w+)\"\}", query)
    assert wanted is not None
    report = StatusReport(stages=[StageStanding(stage=stage)])
    served = {family.name: family for family in status_families(report)}
    assert served[wanted[1]].samples[0].labels == {"stage": wanted[2]}
    assert wanted[2] == stage == Stage(stage)


@pytest.mark.parametrize("found", scaled(), ids=lambda found: found["metadata"]["name"])
def test_scaling_moves_a_deployment_no_further_than_one_key_lets_in(found: Object) -> None:
    spec = found["spec"]
    assert spec["scaleTargetRef"]["name"] in named("Deployment")
    assert 1 <= spec["minReplicaCount"] <= spec["maxReplicaCount"] <= PeerLimits().routes


def test_only_the_aggregator_reaches_the_address_of_producers() -> None:
    rules = named("NetworkPolicy")["broker"]["spec"]["ingress"]
    config = load([BASE / "run.yaml"])
    submit, work = (int((address or "").rpartition(":")[2]) for address in (config.broker.submit, config.broker.work))
    by_port = {rule["ports"][0]["port"]: rule["from"][0]["podSelector"] for rule in rules}
    assert by_port[submit] == {"matchLabels": {"kbrl/role": "aggregator"}}
    assert set(by_port[work]["matchExpressions"][0]["values"]) == {role(found) for found in workloads()} - {"broker"}
    assert named("NetworkPolicy")["nothing-else"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl, which renders the overlays, is not installed")
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_an_overlay_renders_whole(folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered: list[Any] = list(yaml.safe_load_all(done.stdout))
    running = [found for found in rendered if found["kind"] in KINDS]
    assert len(running) == len(workloads())
    model = load([folder / "run.yaml"]).model_name
    mounts = [(role(found), mount) for found in running for c in containers(found) for mount in c["volumeMounts"]]
    mounted = {name for name, mount in mounts if Path(model).is_relative_to(mount["mountPath"])}
    assert mounted == ({"broker", "learner", "sampler"} if folder.name in ON_GPUS else set())
    for found in running:
        assert pod(found)["securityContext"]["seccompProfile"]["localhostProfile"] == "kbrl-sandbox.json"
        assert all(container["image"].startswith("registry.example.org/") for container in containers(found))
        on_gpu = folder.name in ON_GPUS and role(found) != "compile"
        assert ("nodeSelector" in pod(found)) == on_gpu
        limits = pod(found)["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == ON_GPUS.get(folder.name, {}).get(role(found))


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_learner_and_samplers_have_the_gpus_that_the_run_says(folder: Path) -> None:
    config, given = load([folder / "run.yaml"]), ON_GPUS.get(folder.name)
    if given is None:
        assert config.device == "cpu"
    else:
        assert (given["learner"], given["sampler"]) == (config.learner.processes, config.sampler.gpus)
        assert config.learner.shard == (config.learner.processes > 1)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl, which renders the overlays, is not installed")
def test_processes_of_several_gpus_have_room_to_meet_in() -> None:
    command = ["kubectl", "kustomize", str(BASE.parent / "overlays" / "sharded")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    running = {role(found): found for found in yaml.safe_load_all(done.stdout) if found["kind"] in KINDS}
    for name in ("learner", "sampler"):
        mounts = {mount["mountPath"]: mount["name"] for mount in pod(running[name])["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod(running[name])["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert running["sampler"]["spec"]["replicas"] > 1


def test_a_sampler_is_tied_to_no_node_for_its_policies_travel() -> None:
    sampler = named("Deployment")["sampler"]
    assert "affinity" not in pod(sampler)
    assert not any("persistentVolumeClaim" in volume for volume in pod(sampler)["volumes"])
    assert not [word for word in pod(sampler)["containers"][0]["command"] if word.startswith("--policies")]
    waiting = {container["name"] for container in pod(sampler)["initContainers"]}
    assert waiting == {"keys"}, "it waits for no folder of the broker's"


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_there_are_pods_that_verify_where_the_run_has_verifiers(folder: Path) -> None:
    counts = {entry["name"]: entry["count"] for entry in kustomized(folder).get("replicas", [])}
    pods = counts.get("verifier", named("Deployment")["verifier"]["spec"]["replicas"])
    assert bool(load([folder / "run.yaml"]).processes.verifier) == bool(pods)
