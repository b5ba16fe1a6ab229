"""The OpenAI engine against a server that refuses, fails, hangs and babbles."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.cli.preflight import check_engine
from kbrl_async.errors import ConfigError, InfraError, PolicyMismatch
from kbrl_async.runs.config import load, to_yaml
from kbrl_async.sampling.engine import Completion
from kbrl_async.sampling.openai.engine import OpenAIEngine
from kbrl_async.sampling.settings import Sampler
from protocols.records import PolicyVersion, Purpose, SamplingParams
from tests.unit.sampling.fake_endpoint import FakeEndpoint, Reply, chat, error, fake_endpoint

PARAMS = SamplingParams(max_tokens=16, temperature=0.7)
KEY = "sk-very-secret-0123456789"
Use = Callable[[FakeEndpoint, OpenAIEngine], Awaitable[Any]]


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds:
            self.slept.append(seconds)
            self.now += seconds
        await asyncio.sleep(0)


def play(use: Use, clock: Clock | None = None, **options: Any) -> Any:
    """Runs `use` with a fake endpoint and an engine at it; no real second is slept."""
    time = clock or Clock()

    async def main() -> Any:
        async with fake_endpoint() as fake:
            given = Sampler(**{"base_url": fake.base_url, "endpoint_deadline_s": 30.0, **options})
            engine = OpenAIEngine(given, "m", {"MY_KEY": KEY}, rng=random.Random(0), clock=time, sleep=time.sleep)
            try:
                return await use(fake, engine)
            finally:
                await engine.close()

    return asyncio.run(main())


async def ask(engine: OpenAIEngine, purpose: Purpose = Purpose.EVAL, params: SamplingParams = PARAMS) -> Completion:
    return await engine.generate("r1", "write a kernel", params, purpose)


def answering(*replies: Reply, purpose: Purpose = Purpose.EVAL) -> Use:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> tuple[Completion, FakeEndpoint, OpenAIEngine]:
        fake.replies = list(replies)
        return await ask(engine, purpose), fake, engine

    return use


def test_a_chat_completion_comes_back_with_its_usage() -> None:
    done, fake, _ = play(answering(chat("an answer")))
    assert (done.text, done.finish_reason, done.policy_version) == ("an answer", "stop", 0)
    assert (done.prompt_tokens, done.output_tokens, done.token_ids) == (100, 20, [])
    assert fake.seen[0].path == "/v1/chat/completions"
    sent = fake.seen[0].body
    assert sent["messages"] == [{"role": "user", "content": "write a kernel"}]
    assert (sent["max_tokens"], sent["temperature"], "logprobs" in sent) == (16, 0.7, False)


def test_the_completions_route_sends_the_bare_prompt() -> None:
    reply = Reply(body={"choices": [{"text": "x", "finish_reason": "length"}]})
    done, fake, _ = play(answering(reply), endpoint_style="completions")
    assert (done.text, done.finish_reason) == ("x", "length")
    assert (fake.seen[0].path, fake.seen[0].body["prompt"]) == ("/v1/completions", "write a kernel")


def test_an_answer_without_content_is_empty_text() -> None:
    done, _, _ = play(answering(Reply(body={"choices": [{"message": {"content": None}}]})))
    assert done.text == ""


@pytest.mark.parametrize("trouble", [error(429), error(500), error(503), Reply(body=b"<html>"), Reply(body={})])
def test_what_may_pass_is_tried_again(trouble: Reply) -> None:
    done, fake, engine = play(answering(trouble, trouble, chat("at last")))
    assert done.text == "at last"
    assert len(fake.seen) == 3
    assert (engine.stats().requests, engine.stats().retries) == (3, 2)


def test_back_off_grows_and_retry_after_is_honoured() -> None:
    clock = Clock()
    play(answering(error(500), error(500), error(429, Retry_After="7"), chat()), clock)
    assert 0.25 <= clock.slept[0] <= 0.5 <= clock.slept[1] <= 1.0
    assert clock.slept[2] >= 7.0


def test_a_refusal_holds_back_the_other_requests_too() -> None:
    clock = Clock()

    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [error(429, Retry_After="20"), chat()]
        first = asyncio.create_task(ask(engine))
        while not engine.stats().retries:
            await asyncio.sleep(0)
        clock.now = 5.0  # of the 20 seconds asked for
        clock.slept.clear()
        await ask(engine)
        await first

    play(use, clock)
    assert any(seconds == pytest.approx(15.0) for seconds in clock.slept)


def test_an_endpoint_that_keeps_failing_is_a_fault_of_the_infrastructure() -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [error(503, "overloaded")]
        with pytest.raises(InfraError, match=r"503: overloaded\. Lower sampler\.slots"):
            await ask(engine)
        assert len(fake.seen) == 3

    play(use, endpoint_retries=2)


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    clock = Clock()

    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [error(429, "slow down", Retry_After="3600")]
        with pytest.raises(InfraError, match="asks to wait 36"):
            await ask(engine)

    play(use, clock)
    assert clock.slept == []


def test_an_answer_that_never_comes_ends_at_the_deadline_and_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [Reply(hangs=True)]
        asking = asyncio.create_task(ask(engine))
        while not fake.seen:
            await asyncio.sleep(0.001)
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 100.0)  # the deadline passes once the request has come
        with pytest.raises(InfraError, match=r"within 100 s"):
            await asyncio.wait_for(asking, 30)
        await asyncio.wait_for(fake.hung_up.wait(), 30)

    play(use, endpoint_deadline_s=100.0)


def test_cancelling_closes_the_request() -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [Reply(hangs=True)]
        asking = asyncio.create_task(ask(engine))
        while not fake.seen:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(fake.hung_up.wait(), 30)
        assert (engine.stats().active, engine.stats().waiting) == (0, 0)

    play(use)


def test_no_more_requests_at_once_than_slots() -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        opened = asyncio.Event()
        fake.hold = opened.wait
        asking = [asyncio.create_task(ask(engine)) for _ in range(6)]
        while len(fake.seen) < 2:
            await asyncio.sleep(0.001)
        assert (engine.stats().active, engine.stats().waiting) == (2, 4)
        opened.set()
        await asyncio.gather(*asking)
        assert fake.most_at_once == 2

    play(use, slots=2)


def test_requests_a_minute_are_limited() -> None:
    clock = Clock()

    async def use(_: FakeEndpoint, engine: OpenAIEngine) -> None:
        for _ in range(7):
            await ask(engine)

    play(use, clock, requests_per_minute=6)
    assert clock.now == pytest.approx(30.0)  # four at once, then one every ten seconds


def test_cost_is_counted_and_limited() -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        await ask(engine)
        assert engine.stats().cost == pytest.approx(100 * 2e-6 + 20 * 10e-6)
        await ask(engine)
        with pytest.raises(ConfigError, match=r"has cost 0\.0008, and sampler\.max_cost is 0\.0005"):
            await ask(engine)
        assert len(fake.seen) == 2

    play(use, price_input=2.0, price_output=10.0, max_cost=5e-4)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (
            error(401, "Incorrect API key"),
            r"401, it refuses the key: Incorrect API key\. Put a valid key into .*MY_KEY",
        ),
        (error(404, "no such model"), r"404 for model 'm': no such model\. Set model_name"),
        (error(400, "context too long"), "400: context too long"),
        (error(429, "pay first", "insufficient_quota"), "no credit left: pay first"),
        (Reply(302, b"", {"Location": "http://127.0.0.1:1/"}), "302, a redirection"),
    ],
)
def test_a_lasting_refusal_is_said_once_with_its_cure(reply: Reply, says: str) -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [reply]
        with pytest.raises(ConfigError, match=says):
            await ask(engine)
        assert len(fake.seen) == 1

    play(use, api_key_env="MY_KEY")


def test_an_api_that_wants_max_completion_tokens_gets_it() -> None:
    trouble = error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    _, fake, _ = play(answering(trouble, chat()))
    assert fake.seen[1].body["max_completion_tokens"] == 16
    assert "max_tokens" not in fake.seen[1].body


# ── the key ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_key_goes_into_the_header_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [error(401, f"Incorrect API key provided: {KEY}")]
        with pytest.raises(ConfigError) as caught:
            await ask(engine)
        assert fake.seen[0].headers["authorization"] == f"Bearer {KEY}"
        assert KEY not in str(caught.value)
        assert KEY not in repr(engine.stats()) + repr(vars(engine)["_settings"])

    play(use, api_key_env="MY_KEY")
    assert KEY not in caplog.text


def test_an_empty_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"OTHER_KEY is empty .*export OTHER_KEY="):
        OpenAIEngine(Sampler(base_url="http://127.0.0.1:1/v1", api_key_env="OTHER_KEY"), "m", {})


@pytest.mark.parametrize("address", ["http://user:pw@host/v1", "http://host/v1?key=1", "host/v1", "ftp://host", ""])
def test_an_address_that_is_none_or_holds_a_secret_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.base_url"):
        OpenAIEngine(Sampler(base_url=address), "m", {})


# ── before the first request ─────────────────────────────────────────────────────────────────────────────────────


def test_nobody_at_the_address_is_said_at_once() -> None:
    async def main() -> None:
        engine = OpenAIEngine(Sampler(base_url="http://127.0.0.1:1/v1"), "m", {})
        with pytest.raises(ConfigError, match=r"nothing answers at http://127\.0\.0\.1:1/v1: no connection"):
            await engine.check()
        await engine.close()

    asyncio.run(main())


def test_a_model_that_is_not_served_is_named_beside_those_that_are() -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.models = Reply(body={"data": [{"id": "big"}, {"id": "small"}]})
        with pytest.raises(ConfigError, match=r"serves no model 'm'\. Set model_name to one of: big, small"):
            await engine.check()
        fake.models = error(401)
        with pytest.raises(ConfigError, match=r"sampler\.api_key_env=NAME"):
            await engine.check()
        for silent in (error(404), Reply(body=b"?")):
            fake.models = silent  # not every API lists its models
            await engine.check()

    play(use)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_training_is_refused_before_anything_is_sent() -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        with pytest.raises(ConfigError, match=r"training needs them\. Train with sampler\.engine=transformers"):
            await ask(engine, Purpose.TRAIN)
        assert fake.seen == []

    play(use)


PROVEN = chat("a b", token_ids=[5, 6, 7], logprobs={"content": [{"logprob": -0.5}, {"logprob": -1}, {"logprob": 0}]})


def test_training_takes_token_ids_with_their_log_probs() -> None:
    done, fake, _ = play(answering(PROVEN, purpose=Purpose.TRAIN), train_logprobs=True)
    assert (done.token_ids, done.logprobs) == ([5, 6, 7], [-0.5, -1.0, 0.0])
    assert fake.seen[0].body["return_token_ids"] is True


@pytest.mark.parametrize(
    "reply", [chat("no ids"), chat("x", token_ids=[1]), chat("x", logprobs={"content": [{"logprob": -1}]})]
)
def test_training_stops_at_an_answer_without_proof(reply: Reply) -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [reply]
        with pytest.raises(ConfigError, match="Training needs both"):
            await ask(engine, Purpose.TRAIN)

    play(use, train_logprobs=True)


def canary(*logprobs: float) -> Reply:
    given = [None, *({str(i): {"logprob": value}} for i, value in zip((8, 9), logprobs, strict=True))]
    return Reply(body={"choices": [{"text": "", "prompt_logprobs": given}]})


MANIFEST = PolicyVersion(3, 2, 3, "full", "", [7, 8, 9], [-1.0, -2.0])


def test_a_version_is_served_once_the_endpoint_has_proven_it() -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [canary(-1.0, -2.01)]
        await engine.load(MANIFEST, Path())
        assert engine.policy_version == 3
        assert engine.stats().canary_max_error == pytest.approx(0.01)

    play(use, train_logprobs=True)


@pytest.mark.parametrize("reply", [canary(-1.0, -9.0), Reply(body={"choices": [{"text": ""}]})])
def test_an_endpoint_with_other_weights_stops_the_run(reply: Reply) -> None:
    async def use(fake: FakeEndpoint, engine: OpenAIEngine) -> None:
        fake.replies = [reply]
        with pytest.raises(PolicyMismatch):
            await engine.load(MANIFEST, Path())
        assert engine.policy_version == 0

    play(use, train_logprobs=True)


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────

OPENAI = ["sampler.engine=openai", "model_name=m", "sampler.base_url=http://h/v1"]


def test_the_configuration_holds_no_key() -> None:
    config = load(overrides=[*OPENAI, "sampler.api_key_env=MY_KEY"])
    assert "MY_KEY" in to_yaml(config)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sampler.engine=openai", "model_name=m"], "needs sampler.base_url"),
        (["sampler.engine=openai", "sampler.base_url=http://h/v1"], "needs the endpoint's model"),
        (["sampler.base_url=http://h/v1"], "needs sampler.engine=openai"),
        ([*OPENAI, "sampler.max_cost=1"], "needs prices"),
        ([*OPENAI, "timing_bench.shares_with=sampler"], "computes nothing"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(overrides=words)


def test_kbrl_train_refuses_an_endpoint_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="cannot train"):
        check_engine(load(overrides=OPENAI))
    check_engine(load(overrides=[*OPENAI, "sampler.train_logprobs=true"]))
    check_engine(load())
