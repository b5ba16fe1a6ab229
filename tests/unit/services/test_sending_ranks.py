"""Two ranks that share a policy out send it to two samplers, each its own rows: proven there, and whole on disk."""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kbrl_async.learning.policies import versions
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.engine import TransformersEngine
from kbrl_async.weights import MEETING
from kbrl_async.weights.groups import Meeting
from services.sampler.line import LearnerLine
from tests.models import NumberTokenizer
from tests.unit.learning.test_process_group import policy
from tests.unit.services.sending_ranks import VERSIONS, wait_for
from tests.unit.services.test_ranks import groups
from tests.unit.services.test_weights_in_flight import line_of, received
from tests.unit.weights.test_parts import killed_in_transfer


def engine_of(folder: Path) -> TransformersEngine:
    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    return TransformersEngine(model, NumberTokenizer(), Sampler())


async def served(folder: Path) -> None:
    """Each version by two samplers, while a third one is killed between the rows of two ranks."""
    policies = folder / "policies"
    engines = [engine_of(folder) for _ in range(2)]
    lines: list[LearnerLine] = [line_of(policies, engine, f"sampler.{n}") for n, engine in enumerate(engines, 1)]
    for version in range(VERSIONS):
        (folder / f"next-{version}").touch()
        async with asyncio.timeout(200):
            await asyncio.gather(*(received(line, version - 1) for line in lines))
        assert [engine.policy_version for engine in engines] == [version, version]
        if version == 1:
            await asyncio.to_thread(kill_one, policies)
    for engine in engines:
        await engine.close()


def kill_one(policies: Path) -> None:
    meeting = msgspec.json.decode((policies / MEETING).read_bytes(), type=Meeting)
    assert meeting.parts == 2
    victim = mp.get_context("spawn").Process(target=killed_in_transfer, args=(meeting, "sampler.3"))
    victim.start()
    victim.join(200)
    assert victim.exitcode == -signal.SIGKILL


def ran(folder: Path, body: Callable[[Path], Awaitable[None]]) -> dict[str, Any]:
    """What rank 0 has found of versions that `body` waits for."""
    (folder / "groups.json").write_bytes(msgspec.json.encode(groups()))
    policy(folder / "base", "full")
    command = [sys.executable, "-m", "tests.unit.services.sending_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    ranks = subprocess.Popen(command, env=environment)

    async def main() -> None:
        await body(folder)

    try:
        asyncio.run(main())
        (folder / "over").touch()
        assert ranks.wait(200) == 0
    finally:
        ranks.kill()
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return said


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rank_that_can_t_reach_the_samplers_leaves_it_to_rank_0_which_has_all(tmp_path: Path) -> None:
    (tmp_path / "out-of-reach").touch()

    async def first_version(folder: Path) -> None:
        engine = engine_of(folder)
        for version in range(VERSIONS):
            (folder / f"next-{version}").touch()
        async with asyncio.timeout(200):
            await received(line_of(folder / "policies", engine), -1)
        await engine.close()

    said = ran(tmp_path, first_version)
    assert said["held"] == [said["whole"]] * VERSIONS
    assert said["warned"] == ["weights are gathered at rank 0"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_rank_sends_its_own_rows_and_no_rank_holds_all(tmp_path: Path) -> None:
    said = ran(tmp_path, served)
    assert all(0.4 < held / said["whole"] < 0.6 for held in said["held"]), said
    assert set(said["warned"]) <= {"weights not sent"}, "only of the sampler that was killed"
    for version in range(VERSIONS):
        wait_for(tmp_path / "policies" / f"policy-v{version}" / "COMPLETE")
    first = load_file(tmp_path / "policies" / "policy-v0" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert all(torch.equal(first[name], tensor) for name, tensor in base.items())
    last = tmp_path / "policies" / f"policy-v{VERSIONS - 1}"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    manifest = versions.load_weights(last, model)
    assert any(not torch.equal(first[name], tensor) for name, tensor in load_file(last / "model.safetensors").items())
    assert versions.sequence_logprobs(model, manifest.canary_ids) == pytest.approx(manifest.canary_logprobs, abs=1e-4)
