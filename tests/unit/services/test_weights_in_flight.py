"""Versions between learner and sampler: written beside the next update, sent without a file, waited for by rollouts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.durable import is_complete, numbered
from kbrl_async.errors import DiskFull, InfraError, PolicyMismatch
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.snapshot import Snapshots
from kbrl_async.learning.policies.versions import Pending
from kbrl_async.runs.config import load
from kbrl_async.sampling.engine import Engine
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.engine import TransformersEngine
from kbrl_async.sampling.vllm.engine import VLLMEngine
from kbrl_async.sampling.vllm.scheduler import Meter
from kbrl_async.weights import Canaries
from kbrl_async.weights.direct import Line, Sender
from protocols.records import SamplingParams
from services.learner.policy import sender_of
from services.learner.publishing import Publisher
from services.sampler import actor
from services.sampler.line import LearnerLine
from tests.models import EOS, NumberTokenizer
from tests.unit.sampling.conftest import CANARY, make_model
from tests.unit.sampling.fake_vllm import PARTS, FakeAsyncLLM, vllm_options
from tests.unit.services.log import Log
from tests.unit.services.test_sampling_vllm import ask, sampling
from tests.unit.weights.test_direct import until

torch.set_num_threads(1)
PATIENCE_S = 120.0
Served = Callable[[Engine, LearnerLine], Awaitable[None]]


class Learner:
    """Publishes full weights, each version a step from the one before."""

    def __init__(
        self, policies: Path, *, sends: bool = True, dtype: torch.dtype | None = None, skips: bool = False
    ) -> None:
        self.model, self.policies, self.version = make_model(), policies, -1
        self.sender = Sender("127.0.0.1", torch.device("cpu"), PATIENCE_S, lambda _: None) if sends else None
        self.publisher = Publisher(policies, self.sender, skips=skips)
        self._snapshots = Snapshots(dtype)

    @torch.no_grad()
    def publish(self, change: Callable[[Pending], Pending] = lambda pending: pending) -> Pending:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for weight in self.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
        keep = self.publisher.free()
        canaries = Canaries(CANARY, [("7 8 9", [7, 8, 9])])
        made = versions.prepare(
            self.policies, self.model, self.version, None, self.version, canaries,
            copied=lambda named: self._snapshots.of(self.version, named, keep),
        )  # fmt: skip
        self.publisher.begin(change(made), lambda: None)
        return made


def unwritten(gate: threading.Event) -> Callable[[Pending], Pending]:
    """Its files wait for `gate`."""

    def change(pending: Pending) -> Pending:
        def fill(folder: Path) -> Any:
            assert gate.wait(PATIENCE_S)
            return pending.fill(folder)

        return msgspec.structs.replace(pending, fill=fill)

    return change


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    made = Learner(tmp_path / "policies")
    yield made
    made.publisher.close()


def line_of(
    policies: Path,
    engine: Engine,
    name: str = "sampler.1",
    *,
    clock: Callable[[], float] = time.monotonic,
    log: Log | None = None,
) -> LearnerLine:
    service: Any = SimpleNamespace(
        config=load(overrides=["weights.transport=direct", "weights.stalled_s=60"]),
        policies=policies, worker_id=name, log=log or Log(),
    )  # fmt: skip
    return LearnerLine(service, engine, clock)


def serving(kind: str, policies: Path, body: Served, fakes: list[FakeAsyncLLM] | None = None, **of_line: Any) -> None:
    """`body` with an engine of `kind` over another base than what will be sent, and its line to the learner. `fakes`
    gets what stands for vLLM."""

    async def main() -> None:
        base, engine = make_model(seed=9), None
        if kind == "vllm":
            meter = Meter()
            llm = FakeAsyncLLM(base, meter, workers=2)
            if fakes is not None:
                fakes.append(llm)
            options = vllm_options(max_model_len=256, tensor_parallel=2)
            engine = VLLMEngine(llm, PARTS, NumberTokenizer(), frozenset([EOS]), options, meter)
        else:
            engine = TransformersEngine(base, NumberTokenizer(), Sampler())
        try:
            async with asyncio.timeout(200):
                await body(engine, line_of(policies, engine, **of_line))
        finally:
            await engine.close()

    asyncio.run(main())


async def received(line: LearnerLine, than: int) -> None:
    """The first try may be too early."""
    while not await line.load_newer(than):
        await asyncio.sleep(0.01)


# ── the learner's side ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_update_does_not_wait_for_the_files_and_the_one_after_it_does(tmp_path: Path) -> None:
    learner, gate = Learner(tmp_path, sends=False), threading.Event()
    first = learner.publish(unwritten(gate))
    before = {name: tensor.clone() for name, tensor in (first.weights or {}).items()}
    with torch.no_grad():
        for weight in learner.model.parameters():
            weight.zero_()  # the next update
    assert versions.newest(tmp_path) is None
    waiting = threading.Thread(target=learner.publisher.free)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive(), "one version at most is on its way"
    gate.set()
    waiting.join(PATIENCE_S)
    found = versions.newest(tmp_path)
    assert found is not None
    restored = make_model(seed=5)
    assert versions.load_weights(found[1], restored).version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in restored.state_dict().items() if name in before)


def test_a_version_that_is_sent_does_not_wait_for_the_file_of_the_one_before_and_the_newest_is_written(
    tmp_path: Path,
) -> None:
    learner, gate = Learner(tmp_path, skips=True), threading.Event()
    first = learner.publish(unwritten(gate))
    until(lambda: learner.publisher.free() == {0})
    before = {name: tensor.clone() for name, tensor in (first.weights or {}).items()}
    for _ in range(3):
        last = learner.publish()
    assert learner.sender is not None
    assert learner.version == 3
    assert versions.newest(tmp_path) is None
    gate.set()
    learner.publisher.close()
    assert [version for version, _ in numbered(tmp_path, versions.POLICY_PREFIX)] == [0, 3]
    for version, weights in ((0, before), (3, last.weights or {})):
        restored = make_model(seed=5)
        versions.load_weights(versions.version_folder(tmp_path, version), restored)
        assert all(torch.equal(p, weights[name]) for name, p in restored.named_parameters())


@pytest.mark.parametrize("skips", [False, True])
def test_a_version_that_can_t_be_written_ends_the_learner(tmp_path: Path, skips: bool) -> None:
    learner = Learner(tmp_path, sends=skips, skips=skips)

    def full(_: Path) -> Any:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        failed = asyncio.create_task(learner.publisher.failed())
        learner.publish(lambda pending: msgspec.structs.replace(pending, fill=full))
        with pytest.raises(DiskFull):
            await asyncio.wait_for(failed, PATIENCE_S)

    asyncio.run(main())
    with pytest.raises(DiskFull):
        learner.publisher.free()


def test_a_learner_that_is_killed_while_it_writes_leaves_no_version(tmp_path: Path) -> None:
    learner = Learner(tmp_path, sends=False)
    learner.publish()
    learner.publisher.free()
    pending = versions.prepare(tmp_path, learner.model, 1, 0, 1, Canaries(CANARY, []))

    def half(folder: Path) -> Any:
        pending.fill(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:  # it only writes files
        msgspec.structs.replace(pending, fill=half).write()
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [v for v, _ in numbered(tmp_path, versions.POLICY_PREFIX)] == [0]
    assert any(not is_complete(path) for path in tmp_path.iterdir() if path.is_dir()), "half of it is there"
    pending.write()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["policy-v0", "policy-v1"]


def test_a_rounded_version_takes_no_precision_from_who_goes_back_to_it(tmp_path: Path) -> None:
    learner = Learner(tmp_path, sends=False, dtype=torch.bfloat16)
    made = learner.publish()
    learner.publisher.free()
    folder = versions.version_folder(tmp_path, 0)
    assert versions.load_manifest(folder).dtype == "bf16"
    assert (
        sum(p.nbytes for p in learner.model.parameters()) > 1.9 * (folder / "model.safetensors").stat().st_size - 9000
    )
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    versions.load_weights(folder, learner.model)
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())
    other = make_model(seed=3)
    versions.load_weights(folder, other)
    assert made.weights is not None
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), made.weights[name])


def test_a_learner_that_can_t_listen_where_it_was_told_goes_by_files(tmp_path: Path) -> None:
    config = load(overrides=["weights.transport=direct", "weights.address=192.0.2.1", "weights.stalled_s=0.2"])
    service: Any = SimpleNamespace(config=config, device="cpu", log=Log())
    assert sender_of(service, None) is None
    assert [one.event for one in service.log.at("warning")] == ["weights go by files"]


# ── without a file ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_a_version_is_served_before_its_file_is_there(learner: Learner, kind: str) -> None:
    gate = threading.Event()

    async def body(engine: Engine, line: LearnerLine) -> None:
        await line.load_newer(9)  # joins
        for version in range(2):
            gate.clear()
            await asyncio.to_thread(learner.publish, unwritten(gate))
            await received(line, version - 1)
            assert not is_complete(versions.version_folder(learner.policies, version))
            assert engine.policy_version == version
            assert engine.stats().canary_max_error < 1e-4
            done = await engine.generate("r", "1 2 3", SamplingParams(max_tokens=4))
            assert done.policy_version == version
            assert not await line.load_newer(version)
            gate.set()

    serving(kind, learner.policies, body)


def test_answers_in_flight_go_on_over_an_update_and_say_whose_tokens_are_whose(learner: Learner) -> None:
    async def body(engine: Any, line: LearnerLine) -> None:
        await line.load_newer(9)
        await asyncio.to_thread(learner.publish)
        await received(line, -1)
        (llm,) = fakes
        llm.held_at = 4
        answer = asyncio.create_task(engine.generate("r", "1 2 3", SamplingParams(max_tokens=20)))
        while not any(len(r.out) == 4 for r in llm.running.values()):
            await asyncio.sleep(0)
        await asyncio.to_thread(learner.publish)
        task = asyncio.create_task(received(line, 0))
        while engine.policy_version < 1:
            await asyncio.sleep(0)
        llm.held_at = None
        await task
        assert [version for version, _ in (await answer).spans] == [0, 1]

    fakes: list[FakeAsyncLLM] = []
    serving("vllm", learner.policies, body, fakes)


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_other_weights_than_those_of_the_manifest_are_never_served(learner: Learner, kind: str) -> None:
    def swapped(pending: Pending) -> Pending:
        other = {name: tensor + 0.1 for name, tensor in (pending.weights or {}).items()}
        return msgspec.structs.replace(pending, weights=other)

    async def body(engine: Engine, line: LearnerLine) -> None:
        await line.load_newer(9)
        await asyncio.to_thread(learner.publish, swapped)
        with pytest.raises(PolicyMismatch):
            await received(line, -1)

    serving(kind, learner.policies, body)


def test_a_sampler_whose_learner_has_gone_goes_by_files_and_comes_back(learner: Learner, tmp_path: Path) -> None:
    async def body(engine: Engine, line: LearnerLine) -> None:
        await line.load_newer(9)
        assert learner.sender is not None
        learner.publisher.close()
        other = Learner(learner.policies)  # the learner's next process
        other.publish()
        other.publisher.free()
        found = versions.newest(learner.policies)
        assert found is not None
        await engine.load(*found)
        other.publish()
        await received(line, 0)
        assert engine.policy_version == 1
        other.publisher.close()

    serving("transformers", learner.policies, body, clock=lambda: 0.0)


def test_an_engine_that_takes_nothing_is_left_to_the_files(learner: Learner) -> None:
    now, log = [0.0], Log()

    async def body(engine: Any, line: LearnerLine) -> None:
        async def broken(_: Any) -> None:
            raise InfraError("the link broke", "")

        engine.receive = broken
        await line.load_newer(9)
        learner.publish()
        assert not await line.load_newer(-1)
        assert [one.event for one in log.at("warning")] == ["weights not received"]
        del engine.receive
        assert not await line.load_newer(-1), "not at once again"
        now[0] += 31.0
        await received(line, -1)
        assert engine.policy_version == 0

    serving("transformers", learner.policies, body, clock=lambda: now[0], log=log)


def test_the_learner_s_next_process_is_met_at_once_where_the_one_before_was_given_up(learner: Learner) -> None:
    async def body(engine: Engine, line: LearnerLine) -> None:
        await line.load_newer(9)
        await asyncio.to_thread(learner.publisher.close)
        assert not await line.load_newer(-1)
        assert [one.event for one in log.at("warning")] == ["weights not received"]
        other = Learner(learner.policies)
        other.publish()
        await received(line, -1)  # though no time has passed
        assert engine.policy_version == 0
        other.publisher.close()

    log = Log()
    serving("transformers", learner.policies, body, clock=lambda: 0.0, log=log)


def test_who_waits_for_a_learner_s_answer_follows_it_to_its_next_meeting(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, is_over = Line.newest, threading.Event()

    def silent(line: Line) -> int:
        if line.meeting.port != first:
            return answers(line)
        assert is_over.wait(PATIENCE_S)
        raise InfraError("the store has gone", "")

    async def body(engine: Engine, line: LearnerLine) -> None:
        asked = asyncio.create_task(line.load_newer(-1))
        await asyncio.sleep(0.1)
        other = Learner(learner.policies)
        other.publish()
        assert not await asked
        await received(line, -1)
        assert engine.policy_version == 0
        is_over.set()
        other.publisher.close()

    assert learner.sender is not None
    first = learner.sender.meeting.port
    monkeypatch.setattr(Line, "newest", silent)
    serving("transformers", learner.policies, body, clock=lambda: 0.0)


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rollout_waits_for_the_version_that_it_was_dispatched_with(tmp_path: Path) -> None:
    async def body(one: actor.Sampling, llm: FakeAsyncLLM, learner: Any) -> None:
        task, frames = ask(1)
        rollout = asyncio.create_task(one.generate(msgspec.structs.replace(task, policy_version=1), frames))
        await asyncio.sleep(0.1)
        assert not rollout.done()
        assert not llm.running
        learner.publish()
        assert (await rollout).policy_version == 1

    sampling(tmp_path, body)


def test_a_rollout_whose_version_never_comes_is_tried_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "REACH_S", 0.1)

    async def body(one: actor.Sampling, llm: FakeAsyncLLM, learner: Any) -> None:
        task, frames = ask(1)
        with pytest.raises(InfraError, match="policy version 1 was not published within"):
            await one.generate(msgspec.structs.replace(task, policy_version=1), frames)

    sampling(tmp_path, body)
