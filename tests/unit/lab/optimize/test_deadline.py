"""`--seconds` holds for everything that a call does, and what can't be ready in time is not begun."""

from __future__ import annotations

import pytest

from kbrl_async.errors import UserError
from kbrl_async.lab.optimize.deadline import Deadline
from kbrl_async.lab.optimize.search import Budget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_seconds_only_the_search_has_a_limit() -> None:
    clock = Clock()
    deadline = Deadline(None, clock)
    clock.now += 1e6
    assert not deadline.is_over
    assert deadline.within(Budget(tokens=5)) == Budget(60.0, tokens=5)
    assert deadline.search_until() == float("inf")


def test_a_quarter_of_what_is_left_is_kept_for_the_proof() -> None:
    clock = Clock()
    deadline = Deadline(15.0, clock)
    clock.now += 3.0
    assert deadline.within(Budget()).seconds == pytest.approx(9.0)
    assert Deadline(300.0, clock).within(Budget()).seconds == pytest.approx(290.0)
    clock.now += 20.0
    assert deadline.is_over
    assert deadline.within(Budget()).seconds == pytest.approx(0.0, abs=0.01)


def test_a_policy_that_will_not_be_ready_is_given_up_as_soon_as_that_is_known() -> None:
    clock, shown = Clock(), list[str]()
    told = Deadline(15.0, clock).watching(shown.append)
    told("writing the corpus", 0.0)
    clock.now += 4.0
    with pytest.raises(UserError, match=r"can't be made within --seconds 15: that takes 1m 1[56]s more"):
        told("step 15 of 300", 0.05)
    assert shown[0] == "making the policy, once: writing the corpus"


def test_a_policy_that_is_not_ready_in_time_is_given_up() -> None:
    clock = Clock()
    told = Deadline(15.0, clock).watching(lambda _text: None)
    clock.now += 15.0
    with pytest.raises(UserError, match="Leave --seconds out once"):
        told("writing the corpus", 0.0)


def test_time_enough_lets_it_be_made() -> None:
    clock, shown = Clock(), list[str]()
    told = Deadline(300.0, clock).watching(shown.append)
    told("writing the corpus", 0.0)
    clock.now += 10.0
    told("step 30 of 300", 0.1)
    assert shown[-1] == "making the policy, once: step 30 of 300, 1m 30s left"
