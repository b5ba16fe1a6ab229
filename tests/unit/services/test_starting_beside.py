"""vLLM starts beside the learner where its base is known, and answers nothing before the first version is proven."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.durable import is_complete
from kbrl_async.learning.policies import versions
from kbrl_async.runs import origins
from kbrl_async.runs.config import available_cores, cpu_layout, endpoints, load
from kbrl_async.sampling.vllm import start as vllm_start
from kbrl_async.sampling.vllm.engine import VLLMEngine
from kbrl_async.sampling.vllm.options import VLLMOptions
from kbrl_async.sampling.vllm.scheduler import Meter
from kbrl_async.weights import MANIFEST
from services.runtime.service import Service, Stopped
from services.sampler import actor
from services.sampler.actor import EngineLost, Sampling, start_engine
from tests.models import EOS, NumberTokenizer
from tests.unit.sampling.conftest import make_model
from tests.unit.sampling.fake_vllm import PARTS, FakeAsyncLLM
from tests.unit.sampling.test_vllm_engine import Learner as OfFiles
from tests.unit.services.log import Log
from tests.unit.services.test_sampling_vllm import Quiet, ask, worker
from tests.unit.services.test_weights_in_flight import Learner, unwritten

torch.set_num_threads(1)
PATIENCE_S = 60.0
SPLIT = ("sampler.engine=vllm", "placement=split", "device=cpu")


def model_folder(folder: Path) -> str:
    """A model by the look of it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return str(folder)


# ── where ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "is_beside"),
    [
        ((), True),
        (("placement=learner_apart",), True),
        (("sampler.update=full",), True),
        (("placement=one_gpu",), False),
        (("placement=two_gpus",), False),
        (("lora_rank=8",), False),
        (("sampler.engine=transformers",), False),
    ],
)
def test_a_base_s_folder_will_do_where_the_learner_has_a_gpu_of_its_own_and_trains_all_weights(
    tmp_path: Path, words: tuple[str, ...], is_beside: bool
) -> None:
    base = model_folder(tmp_path / "base")
    found = origins.base_beside(load(overrides=[*SPLIT, f"model_name={base}", *words]))
    assert found == (base if is_beside else None)


@pytest.mark.parametrize("lacks", ["config.json", "model.safetensors", "all"])
def test_what_is_no_model_s_folder_is_left_to_the_learner(tmp_path: Path, lacks: str) -> None:
    base = model_folder(tmp_path / "base")
    if lacks != "all":
        (Path(base) / lacks).unlink()
    name = "Qwen/Qwen3-8B" if lacks == "all" else base
    assert origins.base_beside(load(overrides=[*SPLIT, f"model_name={name}"])) is None


def test_a_policy_of_a_run_becomes_a_model_at_the_learner_first(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    (Path(base) / MANIFEST).touch()
    assert origins.base_beside(load(overrides=[*SPLIT, f"model_name={base}"])) is None


# ── how ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Started:
    """What vLLM was started with, and what stands for it."""

    llm: FakeAsyncLLM
    options: VLLMOptions


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Makes `vllm.start` start a stand-in over weights that no version has."""
    made = Started()

    async def launch(options: VLLMOptions, tokenizer: Any, eos_ids: object, *, computing: Any, **_: Any) -> VLLMEngine:
        meter = Meter()
        made.llm, made.options = FakeAsyncLLM(make_model(seed=9), meter), options
        return VLLMEngine(made.llm, PARTS, tokenizer, frozenset([EOS]), options, meter, computing=computing)

    monkeypatch.setattr(vllm_start, "launch", launch)
    monkeypatch.setattr(vllm_start, "preload", lambda *_: None)
    monkeypatch.setattr(vllm_start, "check_split", lambda *_: None)
    monkeypatch.setattr(actor, "load_tokenizer", lambda _: NumberTokenizer())
    return made


class Run:
    """A sampler's run."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.policies, self.stop, self.log = folder / "policies", asyncio.Event(), Log()
        self.policies.mkdir(exist_ok=True)
        config = load(overrides=[*SPLIT, f"model_name={model_folder(folder / 'base')}", *words])
        layout, addresses = cpu_layout(config, available_cores()), endpoints(config, folder)
        self.service = Service("sampler", "sampler.1", folder, config, addresses, layout, self.log)

    async def started(self) -> Sampling:
        engine = await start_engine(self.service, worker(), self.stop)
        assert engine is not None
        return Sampling(self.service, engine, Quiet().gate, lambda: None)


def publish(folder: Path, base: str, count: int = 1) -> None:
    """Versions of the base in that folder, each there at once."""
    learner = OfFiles(make_model(), folder / "made", "full")
    for _ in range(count):
        made = learner.publish()[1]
        manifest = made / MANIFEST
        manifest.write_text(manifest.read_text().replace('"base"', f'"{folder / base}"'))
        made.rename(folder / "policies" / made.name)


def live(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await body()

    asyncio.run(main())


async def beginning(run: Run) -> tuple[Sampling, asyncio.Task[None]]:
    """Its engine is there, and no version."""
    sampling = await run.started()
    begun = asyncio.create_task(sampling.begin(run.stop))
    await asyncio.sleep(0.3)
    assert not begun.done()
    assert "ready" not in [line.event for line in run.log.at("info")]
    return sampling, begun


def test_the_first_version_is_proven_before_anything_is_answered(tmp_path: Path, started: Started) -> None:
    async def body() -> None:
        run = Run(tmp_path)
        sampling, begun = await beginning(run)
        assert started.options.model == str(tmp_path / "base")
        assert not started.llm.seen, "nothing was asked of the base"
        publish(tmp_path, "base")
        await begun
        assert sampling.stats().policy_version == 0
        assert sampling.stats().canary_max_error < 1e-4
        assert (await sampling.generate(*ask(1))).policy_version == 0
        await sampling.close()

    live(body)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    made = Learner(tmp_path / "policies")
    yield made
    made.publisher.close()


def test_the_first_version_comes_straight_from_the_learner_before_its_file_is_there(
    tmp_path: Path, started: Started, learner: Learner
) -> None:
    gate = threading.Event()

    async def body() -> None:
        run = Run(tmp_path, "weights.transport=direct")
        sampling, begun = await beginning(run)
        await asyncio.to_thread(learner.publish, unwritten(gate))
        await begun
        assert not is_complete(versions.version_folder(run.policies, 0))
        assert sampling.stats().policy_version == 0
        gate.set()
        await sampling.close()

    live(body)


def test_a_run_that_goes_on_begins_with_its_newest_version_and_the_base_that_it_names(
    tmp_path: Path, started: Started
) -> None:
    async def body() -> None:
        run = Run(tmp_path)
        publish(tmp_path, model_folder(tmp_path / "other"), 3)
        sampling = await run.started()
        assert started.options.model == str(tmp_path / "other")
        await sampling.begin(run.stop)
        assert sampling.stats().policy_version == 2
        await sampling.close()

    live(body)


def test_a_version_of_another_base_has_the_sampler_start_again(tmp_path: Path, started: Started) -> None:
    async def body() -> None:
        sampling, begun = await beginning(Run(tmp_path))
        publish(tmp_path, "other")
        with pytest.raises(EngineLost, match="policy v0 is of another base"):
            await begun
        await sampling.close()

    live(body)


def test_a_vllm_that_dies_before_there_is_a_version_has_the_sampler_start_again(
    tmp_path: Path, started: Started
) -> None:
    async def body() -> None:
        sampling, begun = await beginning(Run(tmp_path))
        started.llm.die()
        with pytest.raises(EngineLost):
            await begun
        await sampling.close()

    live(body)


def test_a_run_that_stops_before_there_is_a_version_ends_the_sampler(tmp_path: Path, started: Started) -> None:
    async def body() -> None:
        run = Run(tmp_path)
        sampling, begun = await beginning(run)
        run.stop.set()
        with pytest.raises(Stopped):
            await begun
        await sampling.close()

    live(body)
