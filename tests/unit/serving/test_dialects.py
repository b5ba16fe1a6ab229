"""Clients of other projects get the fields that they read, by the calls that they make."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.problems import find_problem
from kbrl_async.serving import dialects
from kbrl_async.serving.documents import Job, Outcome, answer, as_classes
from protocols.records import Fault
from tests.unit.serving.making import Fake, outcome, result, service
from tests.unit.serving.test_service import run

REFERENCE = find_problem("L1/13").source
TASK = {
    "task_id": "parallel_task_000001_0a1b2c3d",
    "reference_code": REFERENCE,
    "kernel_code": "import torch\n\n\nclass ModelNew(torch.nn.Module): ...",
    "backend": "triton",
    "num_correct_trials": 5,
    "num_perf_trials": 100,
    "timeout": 300,
    "priority": "normal",
    "entry_point": "Model",
    "is_valid": False,
    "verbose_errors": True,
    "enable_profiling": True,
    "detect_decoy_kernel": True,
    "reference_backend": None,
}
"""What KernelGYM's reward client sends."""


async def as_its_client(client: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Submit, poll until it ended, fetch: the way of KernelGYM's reward client, which asks again after 429 and 503."""
    while (await client.post("/evaluate", json=task)).status_code in (429, 503):
        await asyncio.sleep(0.01)
    while True:
        status = (await client.get(f"/status/{task['task_id']}")).json()["status"]
        if status in ("completed", "failed", "timeout", "cancelled"):
            break
        await asyncio.sleep(0.01)
    found: dict[str, Any] = (await client.get(f"/results/{task['task_id']}")).json()
    return found


def test_its_coverage_reward_finds_what_it_divides() -> None:
    job = Job("j", "c", dialects.Evaluate("t", "", "").ask(), 0.0)
    verdict = msgspec.structs.replace(result().verdict, own_share=0.75)
    job.outcome = Outcome(msgspec.structs.replace(result(), verdict=verdict))
    found = dialects.evaluation("t", answer(job, job.ask))["metadata"]
    own, whole = (found[f"{name}_in_profiling_us"] for name in ("custom_kernel_cuda_time", "total_kernel_run_time"))
    assert (own / whole, whole) == (0.75, 1000.0)


@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        (Fault.OK, {"compiled": True, "correctness": True, "decoy_kernel": False, "speedup": 2.0, "kernel_runtime": 1.0,
                    "reference_runtime": 2.1, "error_code": None, "error_message": None}),
        (Fault.INCORRECT, {"compiled": True, "correctness": False, "decoy_kernel": False, "speedup": 0.0,
                           "error_code": "CORRECTNESS_ERROR", "error_message": "why"}),
        (Fault.CHEATING, {"correctness": False, "decoy_kernel": True, "speedup": 0.0}),
        (Fault.UNPROVEN, {"correctness": False, "decoy_kernel": False, "speedup": 0.0}),
    ],
)  # fmt: skip
def test_kernelgyms_client_finds_its_fields(tmp_path: Path, fault: Fault, fields: dict[str, Any]) -> None:
    async def does(_: Job) -> Outcome:
        return outcome(fault)

    async def play() -> None:
        async with service(tmp_path, Fake(does)) as (client, _):
            found = await as_its_client(client, TASK)
        assert found["status"] == "completed"
        assert {name: found[name] for name in fields} == fields

    run(play())


def test_kernelgyms_client_never_pays_for_a_fault_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.verification.desk.AGAIN_S", 0.001)
    left = [7]

    async def fails(_: Job) -> Outcome:
        left[0] -= 1
        if left[0] > 0:
            raise InfraError("the sandbox died")
        return outcome(Fault.OK)

    async def play() -> None:
        async with service(tmp_path, Fake(fails)) as (client, _):
            assert (await client.post("/evaluate", json=TASK)).status_code == 503
            # it gives up asking after some tries, and polls: the fault is no end of the task
            assert (await client.get(f"/status/{TASK['task_id']}")).json()["status"] == "pending"
            assert (await as_its_client(client, TASK))["correctness"] is True

    run(play())


def test_a_poll_while_it_runs_says_so_and_an_unknown_task_is_not_there(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def waits(_: Job) -> Outcome:
        await gate.wait()
        return outcome(Fault.OK)

    async def play() -> None:
        async with service(tmp_path, Fake(waits)) as (client, _):
            posting = asyncio.create_task(client.post("/evaluate", json=TASK))
            while (found := await client.get(f"/status/{TASK['task_id']}")).status_code == 404:
                await asyncio.sleep(0.01)
            assert found.json()["status"] in ("pending", "processing")
            gate.set()
            assert (await posting).json()["status"] == "completed"
            assert (await client.get("/results/nobody")).status_code == 404
            named = await client.post("/evaluate", json={**TASK, "entry_point": "Model\nimport os"})
            assert named.status_code == 400

    run(play())


def test_a_class_of_another_name_is_model() -> None:
    ask = dialects.Evaluate("t", "class Softmax: ...", "class SoftmaxNew: ...", entry_point="Softmax").ask()
    seen = as_classes(ask)
    assert seen.reference.endswith("Model = Softmax\n")
    assert seen.candidate.endswith("ModelNew = SoftmaxNew\n")


def test_slime_gets_a_number_and_openrlhf_a_list(tmp_path: Path) -> None:
    async def by_text(job: Job) -> Outcome:
        return outcome(Fault.OK if "right" in job.ask.candidate else Fault.INCORRECT)

    async def play() -> None:
        async with service(tmp_path, Fake(by_text)) as (client, _):
            body = {"prompt": "write", "response": "right", "label": "L1/13"}
            number = (await client.post("/v1/remote_rm", json=body)).json()
            query = {"query": ["<s>write right", "<s>write wrong"], "prompts": ["write "] * 2, "labels": ["L1/13"] * 2}
            lists = (await client.post("/v1/openrlhf", json=query)).json()
            uneven = await client.post("/v1/openrlhf", json={**query, "labels": ["L1/13"]})
        assert number == pytest.approx(0.65 + 0.35 * 2 / 3)
        assert lists["rewards"] == [number, pytest.approx(0.4)]
        assert uneven.status_code == 400

    run(play())


def test_they_get_no_number_where_the_host_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.verification.desk.AGAIN_S", 0.001)

    async def fails(_: Job) -> Outcome:
        raise InfraError("the sandbox died")

    async def play() -> None:
        async with service(tmp_path, Fake(fails)) as (client, _):
            found = await client.post("/v1/remote_rm", json={"prompt": "", "response": "right", "label": REFERENCE})
        assert found.status_code == 503

    run(play())


def test_an_answer_is_what_follows_its_prompt() -> None:
    assert dialects.answer_in("<s>the prompt the answer", "the prompt ") == "the answer"
    assert dialects.answer_in("all of it", "another") == "all of it"
