"""What takes long is said beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kbrl_async.kernels.stages import teller
from kbrl_async.kernels.verify.forecast import TOLD_S, forecast
from kbrl_async.kernels.verify.options import no_tick

Told = list[str]


@pytest.fixture
def told() -> Iterator[Told]:
    words: Told = []
    token = teller.set(words.append)
    yield words
    teller.reset(token)


@pytest.fixture
def first_set(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], None]:
    """Some sets of ten, of which each takes so many seconds, and the first three times that."""

    def run(seconds: float, are_kept: bool) -> None:
        marks = iter([0.0, 3 * seconds, 4 * seconds, 5 * seconds])
        monkeypatch.setattr(time, "perf_counter", lambda: next(marks))
        tick = forecast(no_tick, "L1/7", 10, lambda: are_kept)
        for _ in range(4):
            tick()

    return run


def test_what_is_large_is_told_once_with_its_seconds(told: Told, first_set: Callable[[float, bool], None]) -> None:
    first_set(2.0, True)
    assert told == ["L1/7 is large: about 30 s"]


def test_sets_that_are_made_again_take_longer(told: Told, first_set: Callable[[float, bool], None]) -> None:
    first_set(2.0, False)
    assert told == ["L1/7 is large: about 60 s, one input set in memory at a time"]


def test_the_usual_is_worth_no_word(told: Told, first_set: Callable[[float, bool], None]) -> None:
    first_set(TOLD_S / 20, True)
    assert told == []
