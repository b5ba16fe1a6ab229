"""The line of free workers: in turn, whatever they cover, and nobody is looked at who covers something else."""

from __future__ import annotations

from protocols.leases import FreeLine, LiveTask, PoolWorker
from protocols.queues import StageQueue


def worker(name: str, backends: str = "c", hardware: str = "") -> PoolWorker:
    offered = frozenset(backends.split()) if backends else None
    return PoolWorker(name, "1", name.encode(), ("bench",), 1, 1, 0.0, backends=offered, hardware=hardware)


def names(line: FreeLine, lane: str) -> list[str]:
    return [able.worker_id for able in line.able(lane)]


def test_workers_of_all_kinds_stand_in_one_line() -> None:
    line = FreeLine()
    crowd = [worker("a", "c"), worker("b", "c triton"), worker("d", ""), worker("e", "c")]
    for one in crowd:
        line.add(one)
    assert names(line, "c") == ["a", "b", "d", "e"]
    assert names(line, "triton") == ["b", "d"]


def test_one_that_was_served_goes_to_the_back_and_one_that_stands_stays() -> None:
    line = FreeLine()
    first, second = worker("a", "c"), worker("b", "c triton")
    line.add(first)
    line.add(second)
    line.add(first)
    assert names(line, "c") == ["a", "b"]
    assert line.discard(first)
    line.add(first)
    assert names(line, "c") == ["b", "a"]


def test_a_line_has_nobody_once_all_of_that_kind_have_left() -> None:
    line = FreeLine()
    one = worker("a", "c", "h100")
    line.add(one)
    assert line.has("c on h100")
    assert not line.has("c on h200")
    assert line.discard(one)
    assert not line.discard(one)
    assert not line.has("c")


def test_tasks_that_change_lanes_keep_the_places_of_their_age() -> None:
    queue = StageQueue()
    tasks = [LiveTask(n, f"t{n}", "bench", "g", -1, order=n) for n in range(6)]
    for task in tasks:
        queue.add(task)
    queue.move([tasks[1], tasks[3], tasks[4]], "h100")
    queue.move([tasks[2], tasks[5], tasks[0]], "h100")
    assert list(queue) == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert list(queue.lanes) == [" on h100"]
