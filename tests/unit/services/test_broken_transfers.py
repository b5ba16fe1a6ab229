"""A transfer that breaks off between two tensors: vLLM stays, computes nothing by half of a version, and goes on by the
next whole one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.learning.policies import versions
from kbrl_async.sampling.engine import Engine
from kbrl_async.weights import groups
from kbrl_async.weights.groups import Incoming, Meeting, TensorEntry, TransferGroup
from protocols.records import SamplingParams
from services.sampler.actor import Sampling
from services.sampler.line import LearnerLine
from tests.unit.sampling.conftest import make_model
from tests.unit.sampling.fake_vllm import FakeAsyncLLM, FakeWorker
from tests.unit.services.log import Log
from tests.unit.services.test_sampling_vllm import Quiet, ask, service
from tests.unit.services.test_weights_in_flight import Learner, received, serving

torch.set_num_threads(1)
ANSWER = SamplingParams(max_tokens=20)


class Breaks:
    """Makes transfers end after their first tensor, while it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_set, whole = False, Incoming.tensors

        def tensors(incoming: Incoming, index: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
            for named in whole(incoming, index):
                yield named
                if self.is_set:
                    raise InfraError("weights can't be had directly: Connection closed by peer", "")

        monkeypatch.setattr(Incoming, "tensors", tensors)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Breaks:
    return Breaks(monkeypatch)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    made = Learner(tmp_path / "policies")
    yield made
    made.publisher.close()


async def broken(learner: Learner, engine: Engine, line: LearnerLine, breaks: Breaks) -> None:
    """The engine loses its weights to the next version, which does not come whole."""
    await asyncio.to_thread(learner.publish)
    breaks.is_set = True
    assert not await line.load_newer(engine.policy_version)
    breaks.is_set = False
    assert engine.failure is None


async def loaded(learner: Learner, engine: Engine, version: int) -> None:
    await asyncio.to_thread(learner.publisher.free)
    folder = versions.version_folder(learner.policies, version)
    await engine.load(versions.load_manifest(folder), folder)


@pytest.mark.parametrize("loaded_then", [0, 1])
def test_answers_in_flight_wait_for_whole_weights_and_go_on(learner: Learner, breaks: Breaks, loaded_then: int) -> None:
    """Those of the version that it had, where the one that was on its way never comes, are whole, too."""

    async def body(engine: Any, line: LearnerLine) -> None:
        await line.load_newer(9)  # joins
        await asyncio.to_thread(learner.publish)
        await received(line, -1)
        (llm,) = fakes
        llm.held_at = 4
        answer = asyncio.create_task(engine.generate("r", "1 2 3", ANSWER))
        while not any(len(r.out) == 4 for r in llm.running.values()):
            await asyncio.sleep(0)
        await broken(learner, engine, line, breaks)
        assert [one.event for one in log.at("warning")] == ["weights not received"]
        assert engine.policy_version < 0, "version 0 is wanted again"
        llm.held_at = None
        late = asyncio.create_task(engine.generate("s", "1 2 3", ANSWER))
        await asyncio.wait({answer, late}, timeout=0.3)
        assert llm.paused
        assert not answer.done()
        assert not late.done()
        await loaded(learner, engine, loaded_then)
        assert engine.stats().canary_max_error < 1e-4
        assert [version for version, _ in (await answer).spans] == [0, 1][: loaded_then + 1]
        assert (await late).policy_version == engine.policy_version == loaded_then

    fakes: list[FakeAsyncLLM] = []
    log = Log()
    serving("vllm", learner.policies, body, fakes, log=log)


def test_the_sampler_goes_on_by_the_file_and_ends_no_process(tmp_path: Path, learner: Learner, breaks: Breaks) -> None:
    async def body(engine: Any, _: LearnerLine) -> None:
        run = service(tmp_path, "weights.transport=direct", "weights.stalled_s=60")
        sampling = Sampling(run, engine, Quiet().gate, lambda: None)
        await asyncio.to_thread(learner.publish)
        await sampling.begin(asyncio.Event())
        await asyncio.to_thread(learner.publish)
        breaks.is_set = True
        watching = asyncio.create_task(sampling.watch(0.01))
        while sampling.stats().policy_version < 1:
            await asyncio.sleep(0.01)
        assert not watching.done()
        watching.cancel()
        assert [one.event for one in run.log.at("warning")] == ["weights not received"]
        assert (await sampling.generate(*ask(1))).policy_version == 1

    serving("vllm", learner.policies, body)


def test_a_kernel_that_does_not_end_takes_the_engine_along_as_it_would_whatever_comes_next(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_: TransferGroup, __: object) -> torch.Tensor:
        raise InfraError("weights can't be had directly: Connection closed by peer", "")

    async def body(engine: Any, line: LearnerLine) -> None:
        await line.load_newer(9)
        assert learner.sender is not None
        learner.sender.patience_s = 3.0  # gloo ends what nobody waits for any more after that
        await asyncio.to_thread(learner.publish)
        monkeypatch.setattr(TransferGroup, "receive", closed)
        monkeypatch.setattr(groups, "drained", lambda _: False)
        assert not await line.load_newer(-1)
        assert "its kernel did not end" in str(engine.failure)

    serving("vllm", learner.policies, body)


def test_the_very_first_version_may_break_off(learner: Learner, breaks: Breaks) -> None:
    async def body(engine: Any, line: LearnerLine) -> None:
        await line.load_newer(9)
        await broken(learner, engine, line, breaks)
        with pytest.raises(InfraError, match="no policy yet"):
            await engine.generate("r", "1 2 3", ANSWER)
        await loaded(learner, engine, 0)
        assert (await engine.generate("r", "1 2 3", ANSWER)).policy_version == 0

    serving("vllm", learner.policies, body)


def test_the_learner_s_next_process_makes_them_whole_without_a_file(learner: Learner, breaks: Breaks) -> None:
    async def body(engine: Any, line: LearnerLine) -> None:
        await line.load_newer(9)
        await asyncio.to_thread(learner.publish)
        await received(line, -1)
        await broken(learner, engine, line, breaks)
        await asyncio.to_thread(learner.publisher.close)
        other = Learner(learner.policies)  # as of its checkpoint: version 0 is the newest that it has
        other.publish()
        await received(line, engine.policy_version)
        assert (await engine.generate("r", "1 2 3", ANSWER)).policy_version == 0
        other.publisher.close()

    serving("vllm", learner.policies, body, clock=lambda: 0.0)


def test_an_engine_that_is_closed_meanwhile_ends_who_waits(learner: Learner, breaks: Breaks) -> None:
    async def body(engine: Any, line: LearnerLine) -> None:
        await line.load_newer(9)
        await asyncio.to_thread(learner.publish)
        await received(line, -1)
        await broken(learner, engine, line, breaks)
        waiting = asyncio.create_task(engine.generate("r", "1 2 3", ANSWER))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(InfraError, match="has stopped"):
            await waiting

    serving("vllm", learner.policies, body)


def test_of_several_workers_each_says_why_and_of_several_copies_it_is_raised() -> None:
    """vLLM passes on all answers of the one, and the first answer of the other."""
    worker, nowhere = FakeWorker(make_model(), 0), msgspec.json.encode(Meeting("127.0.0.1", 1, "x"))
    assert worker.meet_learner(nowhere, 1, 2, 0.2).startswith("weights can't be had directly")
    worker.vllm_config.parallel_config.data_parallel_size = 2
    with pytest.raises(InfraError, match="can't be had directly"):
        worker.meet_learner(nowhere, 1, 2, 0.2)
