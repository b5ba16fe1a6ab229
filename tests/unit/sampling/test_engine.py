"""What every engine in this process asks before it takes a request or a version."""

from __future__ import annotations

import asyncio

import pytest

from kbrl_async.errors import ConfigError, InfraError, PolicyMismatch, PromptTooLong
from kbrl_async.sampling.engine import Prompts, check_alive, check_served, wait_for_room


class Counting:
    """A token a word; counts how often it is asked."""

    eos_token_id = None
    asked = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.asked += 1
        return [len(word) for word in text.split()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise NotImplementedError


def test_a_prompt_that_a_whole_group_asks_for_is_tokenised_once_and_each_gets_its_own_copy() -> None:
    tokenizer = Counting()
    prompts = Prompts(tokenizer, 8)
    first = prompts.fitting("a bb", 4)
    first.append(9)
    assert prompts.fitting("a bb", 4) == [1, 2]
    assert tokenizer.asked == 1


def test_a_prompt_may_fill_the_model_to_its_last_position_and_no_further() -> None:
    prompts = Prompts(Counting(), 8)
    assert len(prompts.fitting("a a a a", 4)) == 4
    with pytest.raises(PromptTooLong, match="prompt of 5 tokens and max_tokens 4 exceed the model's 8 positions"):
        prompts.fitting("a a a a a", 4)
    with pytest.raises(ConfigError, match="max_tokens 8 leaves no room"):
        prompts.fitting("a", 8)
    with pytest.raises(ConfigError, match="no tokens"):
        prompts.fitting("", 4)


def test_where_nobody_knows_the_positions_every_prompt_fits() -> None:
    assert len(Prompts(Counting(), None).fitting("a " * 9000, 100_000)) == 9000


def test_an_engine_serves_until_it_fails_or_is_closed() -> None:
    check_alive(None, closed=False)
    with pytest.raises(InfraError, match="has stopped: closed"):
        check_alive(None, closed=True)
    with pytest.raises(InfraError, match="has stopped: out of memory"):
        check_alive(RuntimeError("out of memory"), closed=False)


def test_a_mismatch_stays_one_because_it_must_stop_the_run() -> None:
    with pytest.raises(PolicyMismatch):
        check_alive(PolicyMismatch("other weights", "look"), closed=False)


def test_nothing_is_served_before_the_first_version() -> None:
    check_served(0)
    with pytest.raises(InfraError, match="no policy yet"):
        check_served(-1)


def test_a_version_waits_until_an_older_one_has_ended() -> None:
    async def main() -> list[str]:
        live, changed, seen = [3], asyncio.Event(), []

        def retire() -> None:
            live[0] -= 1
            seen.append(f"{live[0]} live")
            changed.set()

        loop = asyncio.get_running_loop()
        loop.call_soon(retire)
        loop.call_soon(lambda: loop.call_soon(retire))
        await wait_for_room(lambda: live[0], 1, changed, lambda: None, "wait")
        return [*seen, "room"]

    assert asyncio.run(main()) == ["2 live", "1 live", "room"]


def test_versions_that_never_end_are_an_error_after_a_while() -> None:
    with pytest.raises(InfraError, match=r"2 policy versions are still busy after 0\.01 s"):
        asyncio.run(wait_for_room(lambda: 2, 1, asyncio.Event(), lambda: None, "wait", 0.01))


def test_an_engine_that_fails_meanwhile_ends_the_waiting_at_once() -> None:
    async def main() -> None:
        changed = asyncio.Event()
        asyncio.get_running_loop().call_soon(changed.set)
        await wait_for_room(lambda: 2, 1, changed, lambda: check_alive(RuntimeError("gone"), closed=False), "")

    with pytest.raises(InfraError, match="gone"):
        asyncio.run(main())
