"""`sampler.engine=tinker` against a service with a real small model: what is served is proven, odd answers refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import ConfigError, InfraError, PolicyMismatch, PromptTooLong, SessionLost
from kbrl_async.learning.engine import LearnerSetup
from kbrl_async.learning.policies import versions
from kbrl_async.learning.tinker import TinkerLearner
from kbrl_async.learning.tinker import start as start_learner
from kbrl_async.sampling.engine import EngineSetup
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.tinker import TinkerEngine, start
from kbrl_async.tinker_service import path_in
from kbrl_async.weights import Canaries
from protocols.records import PolicyVersion, Purpose, SamplingParams, TrainGroup
from tests.models import EOS, SMALLER, NumberTokenizer, drawn_sample, tiny_model, update_settings

tinker_service = pytest.importorskip("tests.tinker_service", reason="tinker is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the library's connections live as long as its thread
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower

KEY = "tml-the-key-of-a-test"
PARAMS = SamplingParams(max_tokens=12, temperature=1.0)
Published = dict[int, tuple[PolicyVersion, Path]]


class Words(NumberTokenizer):
    unk_token_id = 0

    def convert_tokens_to_ids(self, word: str) -> int:
        return int(word) if word.isdigit() else self.unk_token_id


class Running:
    """The service, and three versions that a learner has published there."""

    def __init__(self, folder: Path) -> None:
        model = tinker_service.CausalLM("tiny", tiny_model(**SMALLER), EOS)
        self.service = tinker_service.Service(models=[model], keys=[KEY])
        self.server = tinker_service.start(self.service)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.folder = folder
        self.published: Published = {}

    def publish(self) -> None:
        learner: TinkerLearner = start_learner(self.setup())
        learner.resume()
        rng = random.Random(0)
        for version in range(3):
            learner.publish(version, version - 1 if version else None)
            found = versions.newest(self.folder)
            assert found is not None
            self.published[version] = found
            rows = [drawn_sample(rng, f"r{r}", [1, 2], 6) for r in range(4)]
            learner.step([TrainGroup("g", "p", 1, rows)], 1.0, lambda: None, version)
        learner.close()

    def setup(self) -> LearnerSetup:
        return LearnerSetup(
            settings=update_settings(learning_rate=0.1, warmup_steps=0, epochs=1, minibatches=1, deadline_s=30.0),
            model_name="tiny",
            lora_rank=4,
            base_url=self.url,
            api_key_env=None,
            checkpoints=self.folder / "none",
            policies=self.folder,
            base=lambda: "tiny",
            canaries=lambda _: Canaries([1, 2, 3, 4, 5, 6], [("", [9, 8, 7, 6])]),
            make_trainer=lambda _: pytest.fail("nothing is trained here"),
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("policies"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        made.publish()
        yield made
    tinker_service.stop(made.server)


@pytest.fixture
def running(shared: Running) -> Running:
    shared.service.faults.clear()
    return shared


class Hurried(Sampler, frozen=True):
    """Waits for answers only as long as that is what is tested."""

    def answer_deadline_s(self, max_tokens: int) -> float:
        return 1.0 if max_tokens == PARAMS.max_tokens else 60.0


def using(
    running: Running, use: Callable[[TinkerEngine], Awaitable[Any]], kind: type[Sampler] = Sampler, **settings: Any
) -> Any:
    """What `use` makes of a started engine."""

    async def first() -> tuple[PolicyVersion, Path]:
        return running.published[0]

    async def run() -> Any:
        setup = EngineSetup(
            settings=kind(engine="tinker", base_url=running.url, deadline_s=60.0, **settings),
            model_name="tiny",
            temperature=1.0,
            max_staleness=2,
            seed=0,
            device="cpu",
            threads=1,
            first_policy=first,
            load_model=lambda _: pytest.fail("nothing is computed here"),
            load_tokenizer=lambda _: Words(),
            breathe=lambda: None,
            progress=lambda: None,
            computing=lambda: pytest.fail("nothing is computed here"),
            told=lambda _: None,
        )
        engine = await start(setup)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_an_answer_has_the_log_probs_of_the_version_that_wrote_it(running: Running) -> None:
    async def use(engine: TinkerEngine) -> None:
        for version, (manifest, folder) in running.published.items():
            await engine.load(manifest, folder)
            done = await asyncio.gather(*(engine.generate(f"r{i}", "1 2 3", PARAMS) for i in range(4)))
            saved = running.service.saved[path_in(folder)]
            for one in done:
                scores = saved.model.prompt_logprobs(saved.state, [*one.prompt_ids, *one.token_ids])[2:]
                assert one.logprobs == pytest.approx(scores, abs=1e-4)
                assert (one.policy_version, one.prompt_ids) == (version, [1, 2, 3])
                assert one.finish_reason == ("stop" if one.token_ids[-1] == EOS else "length")
                assert str(EOS) not in one.text.split()
        assert engine.stats().canary_max_error < 1e-4
        assert (engine.stats().requests, engine.stats().active, engine.follows, engine.is_remote) == (12, 0, True, True)

    using(running, use)


def test_a_sequence_ends_on_the_version_that_it_began_with(running: Running) -> None:
    async def use(engine: TinkerEngine) -> None:
        await engine.load(*running.published[0])
        running.service.break_("retrieve_future", "slow")
        early = asyncio.create_task(engine.generate("r", "1 2 3", PARAMS))
        await asyncio.sleep(0.2)
        await engine.load(*running.published[2])
        await engine.load(*running.published[1])  # older: ignored
        assert (await early).policy_version == 0
        assert (await engine.generate("r", "1 2 3", PARAMS)).policy_version == 2

    patience, tinker_service.WAIT_S = tinker_service.WAIT_S, 1.0
    try:
        using(running, use)
    finally:
        tinker_service.WAIT_S = patience


@pytest.mark.parametrize("kind", ["base", "stale"])
def test_other_weights_under_a_versions_path_are_never_sampled_from(running: Running, kind: str) -> None:
    async def use(engine: TinkerEngine) -> None:
        await engine.load(*running.published[0])
        running.service.break_("weights", kind)
        with pytest.raises(
            PolicyMismatch, match=r"served as policy v2 has the canary log-probs of (policy v0|the base)"
        ):
            await engine.load(*running.published[2])
        with pytest.raises(PolicyMismatch):
            await engine.generate("r", "1 2 3", PARAMS)
        assert isinstance(engine.failure, PolicyMismatch)

    using(running, use)


def test_a_manifest_with_other_log_probs_or_another_path_is_refused(running: Running, tmp_path: Path) -> None:
    manifest, folder = running.published[1]
    wrong = msgspec.structs.replace(manifest, canary_logprobs=[x - 0.5 for x in manifest.canary_logprobs])

    async def use(engine: TinkerEngine) -> None:
        with pytest.raises(PolicyMismatch, match="other weights are served"):
            await engine.load(wrong, folder)

    using(running, use)
    (tmp_path / "tinker.json").write_text(json.dumps({"path": path_in(running.published[2][1])}))

    async def swapped(engine: TinkerEngine) -> None:
        with pytest.raises(Exception, match="differs from its manifest's SHA-256"):
            await engine.load(manifest, tmp_path)

    using(running, swapped)


@pytest.mark.parametrize("kind", ["bad_tokens", "garbage"])
def test_an_answer_that_cant_be_trained_on_is_given_back(running: Running, kind: str) -> None:
    async def use(engine: TinkerEngine) -> None:
        await engine.load(*running.published[0])
        running.service.break_("asample", kind)
        with pytest.raises(InfraError):
            await engine.generate("r", "1 2 3", PARAMS)
        assert engine.failure is None
        assert (await engine.generate("r", "1 2 3", PARAMS)).token_ids
        assert engine.stats().retries == 1

    using(running, use)


def test_a_lost_session_ends_the_engine_and_the_next_one_goes_on(running: Running) -> None:
    async def use(engine: TinkerEngine) -> None:
        await engine.load(*running.published[1])
        running.service.lose_sessions()
        with pytest.raises(SessionLost):
            await engine.generate("r", "1 2 3", PARAMS)
        assert isinstance(engine.failure, SessionLost)
        with pytest.raises(InfraError, match="has stopped"):
            await engine.generate("r", "1 2 3", PARAMS)

    async def again(engine: TinkerEngine) -> None:
        await engine.load(*running.published[1])
        assert (await engine.generate("r", "1 2 3", PARAMS)).policy_version == 1

    using(running, use)
    using(running, again)


def test_a_service_that_does_not_answer_is_not_waited_for_for_ever(running: Running) -> None:
    async def use(engine: TinkerEngine) -> None:
        await engine.load(*running.published[0])
        running.service.break_("asample", "slow")
        with pytest.raises(InfraError, match=r"no answer to an answer within 1 s"):
            await engine.generate("r", "1 2 3", PARAMS)
        assert engine.stats().active == 0

    using(running, use, Hurried)


def test_what_has_no_room_or_no_sense_is_refused_here(running: Running) -> None:
    async def use(engine: TinkerEngine) -> None:
        with pytest.raises(InfraError, match="no policy yet"):
            await engine.generate("r", "1", PARAMS)
        await engine.load(*running.published[0])
        with pytest.raises(PromptTooLong):
            await engine.generate("r", " ".join(["1"] * 250), PARAMS)
        with pytest.raises(ConfigError, match="top_p"):
            await engine.generate("r", "1", SamplingParams(max_tokens=1, top_p=0.5), Purpose.TRAIN)

    using(running, use)


def test_a_key_that_is_refused_ends_the_sampler_with_its_reason(running: Running) -> None:
    async def use(engine: TinkerEngine) -> None:
        await engine.load(*running.published[0])
        running.service.break_("asample", "401")
        with pytest.raises(ConfigError, match="Put a valid key") as caught:
            await engine.generate("r", "1 2 3", PARAMS)
        assert KEY not in str(caught.value)

    using(running, use)


def test_a_stop_that_is_no_token_is_refused(running: Running) -> None:
    async def use(engine: TinkerEngine) -> Any:
        return engine.stop

    assert using(running, use, stop=["5"]) == [5, EOS]
    with pytest.raises(ConfigError, match="is no token of this model"):
        using(running, use, stop=["<|nothing|>"])
