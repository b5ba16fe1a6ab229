"""How often a checkpoint is written, where writing it takes long."""

from __future__ import annotations

import pytest

from services.learner.actor import LONG_S, SHARE, CheckpointPace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_takes_no_time_is_written_every_so_many_updates() -> None:
    pace = CheckpointPace(3, Clock())
    written = []
    for version in range(1, 10):
        if pace.is_due(version, is_saving=False):
            written.append(version)
            pace.took(0.2)
    assert written == [3, 6, 9]


def test_while_one_is_being_written_the_next_is_put_off_and_not_forgotten() -> None:
    pace = CheckpointPace(2, Clock())
    assert not pace.is_due(2, is_saving=True)
    assert pace.is_put_off
    assert pace.is_due(3, is_saving=False)
    pace.took(0.1)
    assert not pace.is_put_off
    assert not pace.is_due(3, is_saving=False)


@pytest.mark.parametrize("update_s", [2.0, 6.0, 40.0])
def test_training_waits_for_long_ones_no_more_than_a_share_of_the_time(update_s: float) -> None:
    """98 GB of eight billion weights and their moments kept each update of 6 s waiting for 100 s."""
    clock, waited = Clock(), 0.0
    pace = CheckpointPace(1, clock)
    for version in range(1, 1000):
        clock.now += update_s
        if pace.is_due(version, is_saving=False):
            clock.now += 10 * LONG_S
            waited += 10 * LONG_S
            pace.took(10 * LONG_S)
    assert 0.7 * SHARE < waited / clock.now <= 1.2 * SHARE
