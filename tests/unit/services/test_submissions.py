"""What an actor has under way: all of it ends before the actor does, and no failure goes unseen."""

from __future__ import annotations

import asyncio

import pytest

from services.runtime.submissions import Submissions


async def _fails() -> None:
    raise OSError("nobody answers")


def test_a_failure_wakes_the_pump_which_then_raises_it() -> None:
    async def pump() -> None:
        wake = asyncio.Event()
        submissions = Submissions(wake)
        submissions.check()
        submissions.begin(_fails())
        await asyncio.wait_for(wake.wait(), 30)
        submissions.check()

    with pytest.raises(OSError, match="nobody answers"):
        asyncio.run(pump())


def test_all_that_is_under_way_is_waited_for_at_the_end() -> None:
    async def pump() -> list[int]:
        wake, done = asyncio.Event(), list[int]()

        async def submission(number: int) -> None:
            await asyncio.sleep(0)
            done.append(number)

        submissions = Submissions(wake)
        for number in range(3):
            submissions.begin(submission(number))
        await submissions.finish()
        assert not wake.is_set()
        return done

    assert sorted(asyncio.run(pump())) == [0, 1, 2]


def test_what_is_still_under_way_at_the_end_may_fail_too() -> None:
    async def pump() -> None:
        submissions = Submissions(asyncio.Event())
        submissions.begin(_fails())
        await submissions.finish()

    with pytest.raises(OSError, match="nobody answers"):
        asyncio.run(pump())
