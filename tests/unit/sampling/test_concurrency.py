"""How many rollouts are under way follows memory and the slowest stage; a simulation of both."""

from __future__ import annotations

import heapq
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.sampling.concurrency import Controller, Signals

MOST, LEAST = 100, 4


def test_without_pressure_all_places_are_used() -> None:
    controller = Controller(MOST, LEAST)
    assert [controller.observe(Signals(float(t), 100, 10 * t)) for t in range(20)] == [100] * 20
    assert controller.reason == ""


def test_a_full_cache_shrinks_at_once_and_then_waits_for_what_was_admitted() -> None:
    controller = Controller(MOST, LEAST)
    limits = [controller.observe(Signals(float(t), 100, kv_usage=0.97)) for t in range(7)]
    assert limits[:5] == [70] * 5
    assert limits[5] < 70
    assert controller.reason == "memory"


def test_a_preemption_counts_even_where_the_cache_looks_empty() -> None:
    controller = Controller(MOST, LEAST)
    controller.observe(Signals(0.0, 100, preemptions=3))
    assert controller.limit == 100
    assert controller.observe(Signals(1.0, 100, preemptions=4)) == 70


def test_it_grows_again_only_while_its_places_are_taken() -> None:
    controller = Controller(MOST, LEAST)
    controller.observe(Signals(0.0, 100, kv_usage=0.97))
    assert controller.observe(Signals(10.0, 30, kv_usage=0.2)) == 70
    assert controller.observe(Signals(11.0, 70, kv_usage=0.2)) == 77
    assert controller.observe(Signals(12.0, 77, kv_usage=0.85)) == 77


def test_a_queue_behind_takes_it_down_to_what_keeps_that_stage_busy() -> None:
    controller = Controller(MOST, LEAST)
    for t in range(30):  # a generation takes 5 s: 100 under way, 20 end each second
        controller.observe(Signals(float(t), 100, 20 * t, queued_behind=44, rate_behind=4.0))
    assert controller.reason == "queue"
    assert 4.0 * 5.0 <= controller.limit <= 1.25 * 4.0 * 5.0


def test_several_samplers_share_what_the_stage_behind_can_take() -> None:
    def limit(samplers: int) -> int:
        controller = Controller(MOST)
        for t in range(30):
            controller.observe(Signals(float(t), 100, 20 * t, queued_behind=44, rate_behind=4.0, samplers=samplers))
        return controller.limit

    assert limit(1) / 4 == pytest.approx(limit(4), abs=1)


def test_where_nobody_speaks_of_queues_they_bound_nothing() -> None:
    controller = Controller(MOST, LEAST)
    for t in range(10):
        controller.observe(Signals(float(t), 100, 20 * t, queued_behind=900, rate_behind=4.0))
    assert controller.limit == 4
    assert controller.observe(Signals(11.0, 4, 300)) == 100


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1), st.integers(0, 999), st.floats(0, 50)), max_size=30))
def test_the_limit_is_always_within_its_bounds(moves: list[tuple[int, float, int, float]]) -> None:
    controller = Controller(MOST, LEAST)
    for t, (active, kv, queued, rate) in enumerate(moves):
        limit = controller.observe(Signals(float(t), active, t * 7, kv, t // 3, queued, rate))
        assert LEAST <= limit <= MOST


class Pipeline:
    """A sampler whose answers have a long tail and whose KV is finite; the stage behind it ends `rate` a second."""

    def __init__(self, rate: float, kv_tokens: float, seed: int = 0) -> None:
        self.rng, self.rate, self.kv_tokens = random.Random(seed), rate, kv_tokens
        self.running: list[tuple[float, float]] = []  # (ends at, began at)
        self.queue: deque[float] = deque()
        self.now = self.busy = 0.0
        self.finished = self.done = self.preempted = 0
        self.most_waiting = 0

    def kv(self) -> float:
        return sum(40.0 * (self.now - began) for _, began in self.running) / self.kv_tokens

    def step(self, limit: int) -> None:
        """A tenth of a second."""
        self.now += 0.1
        while len(self.running) < limit:
            heapq.heappush(self.running, (self.now + min(60.0, self.rng.lognormvariate(1.5, 0.8)), self.now))
        while self.running and self.running[0][0] <= self.now:
            self.queue.append(heapq.heappop(self.running)[0])
            self.finished += 1
        if self.kv() > 1.0:  # the newest loses what it has
            self.preempted += 1
            newest = max(self.running, key=lambda r: r[1])
            self.running.remove(newest)
            heapq.heapify(self.running)
        self.busy = min(1.0, self.busy + self.rate * 0.1)
        while self.busy >= 1.0 and self.queue:
            self.queue.popleft()
            self.busy -= 1.0
            self.done += 1
        self.most_waiting = max(self.most_waiting, len(self.queue))

    def run(self, seconds: int, controller: Controller | None, most: int) -> None:
        limit = most
        for tick in range(10 * seconds):
            self.step(limit)
            if controller is not None and tick % 10 == 9:
                seen = Signals(
                    self.now, len(self.running), self.finished, self.kv(), self.preempted, len(self.queue), self.rate
                )
                limit = controller.observe(seen)


def test_in_front_of_a_slow_stage_the_queue_stays_flat_and_the_stage_busy() -> None:
    free, steered = Pipeline(4.0, 1e9), Pipeline(4.0, 1e9)
    free.run(300, None, 100)
    steered.run(300, Controller(MOST, LEAST), 100)
    assert free.most_waiting > 1000
    assert steered.most_waiting < 4.0 * 10.0 * 3
    assert steered.done > 0.97 * free.done


def test_with_too_little_memory_it_settles_below_it_and_loses_next_to_nothing() -> None:
    free, steered = Pipeline(1e3, 12_000.0), Pipeline(1e3, 12_000.0)
    free.run(300, None, 100)
    steered.run(300, Controller(MOST, LEAST), 100)
    assert free.preempted > 500
    assert steered.preempted < 0.1 * free.preempted


def test_with_room_for_all_it_takes_nothing_away() -> None:
    free, steered = Pipeline(1e3, 1e9), Pipeline(1e3, 1e9)
    free.run(120, None, 100)
    steered.run(120, Controller(MOST, LEAST), 100)
    assert steered.done == free.done
