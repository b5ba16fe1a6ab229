"""Waiting before the next request."""

from __future__ import annotations

import random

import pytest

from kbrl_async.sampling.openai.pacing import Pace, back_off_s, retry_after_s

EPOCH = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110


def test_back_off_doubles_up_to_its_limit_and_keeps_at_least_half_of_it() -> None:
    rng = random.Random(0)
    for failures, full in ((1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 20.0), (12, 20.0)):
        waits = [back_off_s(failures, rng) for _ in range(50)]
        assert full / 2 <= min(waits) < max(waits) <= full


def test_requests_refused_together_do_not_come_back_together() -> None:
    rng = random.Random(0)
    waits = [back_off_s(1, rng, asked_s=3.0) for _ in range(20)]
    assert min(waits) >= 3.0
    assert len(set(waits)) == 20


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("Sun, 06 Nov 1994 08:49:47 GMT", 10.0), ("-3", 0.0), ("soon", None), ("", None),
     (None, None), ("inf", None)],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, EPOCH) == seconds


def test_the_pace_lets_a_few_through_and_then_spaces_them() -> None:
    pace = Pace(per_minute=60, burst=3)
    assert [pace.reserve(100.0) for _ in range(5)] == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert pace.reserve(1000.0) == 0.0


def test_no_limit_never_waits() -> None:
    pace = Pace()
    assert {pace.reserve(1.0) for _ in range(100)} == {0.0}


def test_a_refusal_holds_all_requests_back() -> None:
    pace = Pace()
    pace.close(until=10.0)
    assert pace.reserve(4.0) == 6.0
    assert pace.reserve(11.0) == 0.0
