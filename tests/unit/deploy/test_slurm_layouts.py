"""Which steps a Slurm job starts where, by the script itself with a stand-in for `srun`: layouts fit the nodes."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from kbrl_async.cli.worker import SERVICES
from tests.unit.deploy.reading import DEPLOY

SCRIPT = DEPLOY / "slurm" / "run.sbatch"
GPUS, CORES = 4, 16
STAND_INS = {"srun": 'line=$(printf "%q " "$@"); echo "$line" >>"$STEPS"',
             "scontrol": "printf '%s\\n' $SLURM_JOB_NODELIST",
             "hostname": "echo n1",
             "python": 'case "$*" in *" prepare "*) echo "$*" >"$STEPS.prepare";; esac'}  # fmt: skip


class Step(msgspec.Struct, frozen=True):
    name: str
    nodes: tuple[str, ...]
    gpus: int
    cores: int
    options: Mapping[str, str]
    command: str


def step(line: str) -> Step:
    words = shlex.split(line)
    end = next(index for index, word in enumerate(words) if not word.startswith("--"))
    options = {key: value for key, _, value in (word.removeprefix("--").partition("=") for word in words[:end])}
    gpus = 0 if options.get("gres") == "none" else int(options["gpus-per-node"])
    nodes = tuple(options["nodelist"].split(","))
    assert len(nodes) == int(options["nodes"])
    return Step(options["job-name"], nodes, gpus, int(options["cpus-per-task"]), options, shlex.join(words[end:]))


def submitted(folder: Path, nodes: int, layout: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "STEPS": str(folder / "steps"), "PYTHON": str(folder / "python"),
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": str(GPUS),
        "SLURM_CPUS_PER_TASK": str(CORES), "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": " ".join(f"n{number + 1}" for number in range(nodes)),
        "BASH_FUNC_kill%%": "() { :; }",  # the aggregator's stand-in ends at once: let others write their line
    }  # fmt: skip
    command = ["bash", str(SCRIPT)]
    return subprocess.run(
        command, env={**environment, **layout}, capture_output=True, text=True, timeout=60, check=False
    )


def steps(folder: Path, nodes: int, layout: Mapping[str, str]) -> Sequence[Step]:
    done = submitted(folder, nodes, layout)
    assert (done.returncode, done.stderr) == (0, "")
    return [step(line) for line in (folder / "steps").read_text().splitlines()]


LAYOUTS: Mapping[str, tuple[int, Mapping[str, str], Mapping[str, str]]] = {
    "as it comes": (2, {}, {"learner": "n1", "sampler": "n1", "bench": "n1 n1 n2 n2 n2"}),
    "a learner of two GPUs": (
        1,
        {"LEARNER_GPUS": "2"},
        {"learner": "n1", "sampler": "n1", "bench": "n1"},
    ),
    "a learner of two nodes, samplers with tensor parallel on a third": (
        4,
        {"LEARNER_NODES": "2", "LEARNER_GPUS": "4", "SAMPLER_NODES": "1", "SAMPLERS": "2", "SAMPLER_GPUS": "2"},
        {"learner": "n1,n2", "sample": "n4 n4", "bench": "n3 n3 n3"},
    ),
    "samplers with data parallel on two nodes, and verifiers": (
        3,
        {"SAMPLER_NODES": "2", "SAMPLER_COPIES": "3", "VERIFIERS": "1"},
        {"learner": "n1", "sample": "n2 n3", "verify": "n1 n2 n3", "bench": "n1 n1"},
    ),
    "many samplers on the first node": (
        2,
        {"SAMPLERS": "3"},
        {"learner": "n1", "sampler": "n1 n1 n1", "bench": "n2 n2 n2"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_its_roles_on_its_nodes_and_no_step_takes_what_another_has(name: str, tmp_path: Path) -> None:
    nodes, layout, wanted = LAYOUTS[name]
    found = steps(tmp_path, nodes, layout)
    gpus: Counter[str] = Counter()
    cores: Counter[str] = Counter()
    roles: defaultdict[str, list[str]] = defaultdict(list)
    for one in found:
        assert "overlap" not in one.options, "a step that overlaps takes the first GPUs, whoever has them"
        assert {"exact", "mem"} <= set(one.options), "else it takes all that the node has"
        roles[one.name.rpartition("-")[0] or one.name].append(",".join(one.nodes))
        for node in one.nodes:
            gpus[node] += one.gpus
            cores[node] += one.cores
    assert max(gpus.values()) <= GPUS
    assert max(cores.values()) <= CORES
    placed = {role: " ".join(sorted(where)) for role, where in roles.items()}
    everywhere = " ".join(f"n{number + 1}" for number in range(nodes))
    assert placed == {"broker": "n1", "reward_aggregator": "n1", "compile": everywhere, **wanted}


def test_the_ranks_are_as_many_as_the_run_is_told(tmp_path: Path) -> None:
    layout = {"LEARNER_NODES": "2", "LEARNER_GPUS": "3", "SAMPLER_NODES": "2", "SAMPLERS": "2", "SAMPLER_GPUS": "2"}
    learner = next(one for one in steps(tmp_path, 4, layout) if one.name == "learner")
    assert (learner.gpus, len(learner.nodes)) == (3, 2)
    assert "torch.distributed.run --nnodes 2 --nproc-per-node 3" in learner.command
    told = dict(word.split("=", 1) for word in (tmp_path / "steps.prepare").read_text().split() if "=" in word)
    assert (told["learner.processes"], told["learner.shard"]) == ("6", "true")
    assert told["processes.sampler"] == "4"
    assert (told["sampler.tensor_parallel"], told["sampler.data_parallel"]) == ("2", "1")


def test_a_sampler_on_a_node_of_its_own_needs_no_disk_of_the_runs(tmp_path: Path) -> None:
    layout = {"SAMPLER_NODES": "1", "SAMPLERS": "2", "TMPDIR": "/scratch"}
    found = [one.command for one in steps(tmp_path, 2, layout) if one.name.startswith("sample-")]
    assert len(found) == 2
    assert all("/issued/sampler/slurm" in command and "--policies" not in command for command in found)
    folders = {command.split("--folder ")[1] for command in found}
    assert folders == {"/scratch/kbrl-sample-1-7", "/scratch/kbrl-sample-2-7"}, "no two share one"


def test_too_few_nodes_are_said_before_anything_starts(tmp_path: Path) -> None:
    done = submitted(tmp_path, 2, {"LEARNER_NODES": "2", "SAMPLER_NODES": "1"})
    assert done.returncode == 2
    assert "2 nodes are too few" in done.stderr
    assert not (tmp_path / "steps").exists()


def test_workers_of_every_kind_may_join_from_a_job_of_their_own() -> None:
    asked = (DEPLOY / "slurm" / "workers.sbatch").read_text().partition("${KIND:?")[2].partition("}")[0]
    assert {*asked.replace(" or ", ", ").split(", ")} == set(SERVICES)
