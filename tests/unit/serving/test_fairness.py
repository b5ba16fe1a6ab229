"""Many clients: nobody waits for another's flood or for another's hanging jobs; who asks too often is slowed."""

from __future__ import annotations

import random

from kbrl_async.serving.fairness import FairQueue, RequestRates


def order(queue: FairQueue[str], seconds: float = 1.0) -> list[str]:
    found = []
    while (taken := queue.take()) is not None:
        found.append(taken[1])
        queue.ended(taken[0], seconds)
    return found


def test_clients_take_turns_whoever_came_first() -> None:
    queue = FairQueue[str]()
    for number in range(4):
        queue.add("flood", f"f{number}")
    queue.add("calm", "c0")
    queue.add("calm", "c1")
    assert order(queue) == ["f0", "c0", "f1", "c1", "f2", "f3"]


def test_of_one_client_what_is_urgent_goes_first() -> None:
    queue = FairQueue[str]()
    for name, priority in (("a", "low"), ("b", "normal"), ("c", "high"), ("d", "normal")):
        queue.add("me", name, priority)
    assert order(queue) == ["c", "b", "d", "a"]


def test_who_uses_more_time_gets_fewer_turns() -> None:
    queue = FairQueue[str]()
    for number in range(10):
        queue.add("hangs", f"h{number}")
        queue.add("quick", f"q{number}")
    served: list[str] = []
    for _ in range(12):
        client, item = queue.take() or ("", "")
        served.append(item)
        queue.ended(client, 60.0 if client == "hangs" else 1.0)
    assert sum(item.startswith("h") for item in served) <= 2


def test_running_jobs_count_before_they_end() -> None:
    queue = FairQueue[str]()
    for number in range(3):
        queue.add("a", f"a{number}")
    queue.add("b", "b0")
    assert [(queue.take() or ("", ""))[0] for _ in range(2)] == ["a", "b"]


def test_time_that_was_not_asked_for_is_not_owed() -> None:
    queue = FairQueue[str]()
    queue.add("early", "e")
    order(queue, 0.1)
    for number in range(20):
        queue.add("busy", f"b{number}")
    for _ in range(10):
        queue.ended((queue.take() or ("", ""))[0], 10.0)
    for number in range(5):
        queue.add("early", f"e{number}")
    assert [item[0] for item in order(queue, 10.0)[:6]].count("b") >= 2


def test_what_it_remembers_is_bounded_and_everything_is_served_once() -> None:
    queue, rng = FairQueue[int](), random.Random(1)
    added, served, running = 0, [], list[str]()
    for _ in range(5000):
        if rng.random() < 0.5:
            queue.add(f"c{rng.randrange(500)}", added, rng.choice(["low", "normal", "high"]))
            added += 1
        elif (taken := queue.take()) is not None:
            running.append(taken[0])
            served.append(taken[1])
        if running and rng.random() < 0.6:
            queue.ended(running.pop(), rng.random())
    while (taken := queue.take()) is not None:
        running.append(taken[0])
        served.append(taken[1])
    for client in running:
        queue.ended(client, 1.0)
    assert sorted(served) == list(range(added))
    assert len(queue) == 0
    assert len(queue.used) == 0


def test_so_many_a_minute() -> None:
    rates = RequestRates(60)
    assert sum(rates.wait_s("a", 0.0) == 0 for _ in range(100)) == 60
    assert 0 < rates.wait_s("a", 0.0) <= 1
    assert rates.wait_s("a", 1.0) == 0
    assert rates.wait_s("b", 1.0) == 0
    assert RequestRates(0).wait_s("a", 0.0) == 0
    assert RequestRates(2).wait_s("a", 0.0, 50) == 0  # a batch of more than a minute's is not refused for ever


def test_of_clients_that_come_once_not_all_are_remembered() -> None:
    rates = RequestRates(60)
    for number in range(rates.CLIENTS + 100):
        rates.wait_s(f"c{number}", 0.0)
    assert len(rates.left) == rates.CLIENTS
