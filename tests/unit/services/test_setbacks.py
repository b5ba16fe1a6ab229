"""Failure after failure is told later and later; one success, and the next is told at once."""

from __future__ import annotations

from services.runtime.setbacks import MOST_S, Setbacks


def test_what_fails_together_is_told_at_once_and_what_goes_on_failing_waits_twice_as_long_each_time() -> None:
    setbacks = Setbacks(free=2)
    assert [setbacks.failed() for _ in range(5)] == [0.0, 0.0, 0.1, 0.2, 0.4]
    assert [setbacks.failed() for _ in range(100)][-1] == MOST_S


def test_a_task_that_was_done_forgives_what_was_before() -> None:
    setbacks = Setbacks(free=1)
    assert [setbacks.failed() for _ in range(3)] == [0.0, 0.1, 0.2]
    setbacks.worked()
    assert setbacks.failed() == 0.0


def test_a_long_row_is_told_ever_less_often() -> None:
    setbacks = Setbacks(free=2)
    told = []
    for _ in range(20):
        setbacks.failed()
        told.append(setbacks.is_worth_telling)
    assert [number for number, is_told in enumerate(told, 1) if is_told] == [1, 2, 4, 8, 16]
    setbacks.worked()
    setbacks.failed()
    assert setbacks.is_worth_telling
