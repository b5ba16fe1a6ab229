"""Waiting for answers of the service, without its library."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import Any

from kbrl_async.tinker_service import Account


def test_an_answer_that_came_while_the_loop_stood_still_is_not_late() -> None:
    account = Account.__new__(Account)

    async def play() -> Any:
        answer = concurrent.futures.Future[str]()
        asking = asyncio.create_task(account.answer(answer, "an answer", 0.01))
        await asyncio.sleep(0)
        answer.set_result("here")
        time.sleep(0.05)  # the loop stands still
        return await asking

    assert asyncio.run(play()) == "here"
