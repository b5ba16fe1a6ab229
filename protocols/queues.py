"""The tasks that the ledger knows: live ones in a queue per stage, ended ones as ids in a bounded memory.

Invariants
* A live task is in exactly one place: its stage's queue, a lease, or in grace after a restart.
* A queue is first in, first out by the time a task entered the stage (at a bench but for `affinity`); a task that is
  given back goes to the front.
* Tasks of different needs wait in lanes of their own, so that one that nobody can do stands in nobody's way.
* Ended ids are remembered up to a limit, oldest forgotten first (I10); a retired group is forgotten at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from protocols.events import Snapshot, TaskRow
from protocols.leases import LiveTask
from protocols.messages import Stage, Submit

STAGES: tuple[str, ...] = tuple(Stage)


class EndedTask(msgspec.Struct, frozen=True):
    seq: int
    task_id: str
    group_id: str


def _tombstone(group_id: str) -> str:
    return f"retired group {group_id}"


class StageQueue:
    """Tasks that wait at one stage, in a lane for each need; the oldest of several lanes' heads goes first."""

    def __init__(self) -> None:
        self.lanes: dict[str, OrderedDict[str, LiveTask]] = {}
        """By need; a lane exists while it holds something."""

    def add(self, task: LiveTask, *, front: bool = False) -> None:
        lane = self.lanes.setdefault(task.lane, OrderedDict())
        lane[task.task_id] = task
        if front:
            lane.move_to_end(task.task_id, last=False)

    def discard(self, task: LiveTask) -> None:
        lane = self.lanes.get(task.lane)
        if lane is not None and lane.pop(task.task_id, None) is not None and not lane:
            del self.lanes[task.lane]

    def move(self, tasks: Sequence[LiveTask], hardware: str) -> None:
        """Another lane for these tasks of this queue, at the places that their age gives them."""
        for task in tasks:
            self.discard(task)
            task.hardware = hardware
            self.add(task)
        for name in {task.lane for task in tasks}:
            self.lanes[name] = OrderedDict(sorted(self.lanes[name].items(), key=lambda item: item[1].order))

    def oldest(self, needs: Iterable[str] | None = None) -> LiveTask | None:
        """The head that has waited longest, among these lanes or all."""
        lanes = self.lanes.values() if needs is None else [self.lanes[n] for n in needs if n in self.lanes]
        return min((next(iter(lane.values())) for lane in lanes), key=lambda task: task.order, default=None)

    def waiting(self, needs: str) -> int:
        return len(self.lanes.get(needs, ()))

    def __len__(self) -> int:
        return sum(map(len, self.lanes.values()))

    def __iter__(self) -> Iterator[str]:
        return (task_id for lane in self.lanes.values() for task_id in lane)

    def __contains__(self, task_id: object) -> bool:
        return any(task_id in lane for lane in self.lanes.values())


class HardwarePins:
    """Which hardware a group's timings come from: its rewards are compared with each other, so one kind for all.

    A group is pinned when its first task is leased at `bench`, by the hardware that this bench declares; benches that
    declare none pin nothing and get no pinned task. Where no such bench is left, the pin is lifted after a bounded wait
    if nothing was timed yet; else what waits ends as `no_worker`. Bounded: the oldest pins are forgotten first.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._pins: OrderedDict[str, str] = OrderedDict()
        self._timed: set[str] = set()

    def of(self, group_id: str) -> str:
        """The hardware that the group is pinned to; empty: none yet."""
        return self._pins.get(group_id, "")

    def pin(self, group_id: str, hardware: str) -> bool:
        """True where this has pinned the group just now."""
        if not group_id or not hardware or group_id in self._pins:
            return False
        self._pins[group_id] = hardware
        while len(self._pins) > self._limit:
            self._timed.discard(self._pins.popitem(last=False)[0])
        return True

    def timed(self, group_id: str) -> None:
        """A result has come from that hardware: the pin stays."""
        if group_id in self._pins:
            self._timed.add(group_id)

    def lift(self, group_id: str) -> bool:
        """Undo a pin that nothing was timed under; False where it has to stay."""
        if group_id in self._timed:
            return False
        return self._pins.pop(group_id, None) is not None

    def drop(self, group_id: str) -> None:
        self._pins.pop(group_id, None)
        self._timed.discard(group_id)

    def __len__(self) -> int:
        return len(self._pins)


class TaskTable:
    """Live tasks by id, queue and group, and the memory of ended ones."""

    def __init__(self, finished_limit: int) -> None:
        self.live: dict[str, LiveTask] = {}
        self.ended: OrderedDict[str, EndedTask] = OrderedDict()
        self.queues: dict[str, StageQueue] = {stage: StageQueue() for stage in STAGES}
        self.grace: dict[str, LiveTask] = {}
        self.pins = HardwarePins(finished_limit)
        self._groups: dict[str, dict[str, None]] = {}
        self._finished_limit = finished_limit
        self._next_seq = 1
        self._next_order = 1

    def knows(self, submit: Submit) -> bool:
        """True for a known task and for any task of a retired group: a late copy of a Submit must not revive it."""
        return submit.task_id in self.live or submit.task_id in self.ended or _tombstone(submit.group_id) in self.ended

    def add(self, submit: Submit, now: float) -> LiveTask:
        task = LiveTask(
            self._next_seq, submit.task_id, submit.stage, submit.group_id, submit.max_staleness, needs=submit.needs
        )
        self._next_seq += 1
        self.live[task.task_id] = task
        self._index(task.group_id, task.task_id)
        self.enter(task, submit.stage, now)
        return task

    def enter(self, task: LiveTask, stage: str, now: float) -> None:
        """Queue the task, which is nowhere else, at the back of a stage; what it lost at the last one is forgotten."""
        task.stage = stage
        task.entered_at = now
        task.order = self._next_order
        self._next_order += 1
        task.losses = task.passed_over = 0
        task.excluded = task.fenced = task.barred = frozenset()
        task.opinions = ()
        if stage == Stage.BENCH:
            task.hardware = self.pins.of(task.group_id)
        self.queues[stage].add(task)

    def repin(self, group_id: str, hardware: str) -> None:
        """The group is pinned, or its pin is lifted: its tasks that wait at a bench go to the lane of that hardware."""
        queue = self.queues[Stage.BENCH]
        tasks = [self.live[task_id] for task_id in self.group(group_id) if task_id in self.live]
        queue.move([t for t in tasks if t.stage == Stage.BENCH and t.task_id in queue.lanes.get(t.lane, ())], hardware)

    def give_back(self, task: LiveTask) -> None:
        """Queue the task, which is nowhere else, in front of its stage."""
        self.queues[task.stage].add(task, front=True)

    def take_out(self, task: LiveTask) -> None:
        """Remove the task from its queue or from grace; a leased one is in neither."""
        self.queues[task.stage].discard(task)
        if task.grace_until is not None:
            task.grace_until = None
            del self.grace[task.task_id]

    def end(self, task: LiveTask) -> list[EndedTask]:
        """Turn the task, which is nowhere queued, into a remembered id; returns what is forgotten for it."""
        del self.live[task.task_id]
        return self._remember(EndedTask(task.seq, task.task_id, task.group_id))

    def close(self, group_id: str) -> tuple[TaskRow, list[EndedTask]] | None:
        """Remember that the group is retired, in the same bounded memory; None where it is known already."""
        task_id = _tombstone(group_id)
        if task_id in self.ended:
            return None
        row = TaskRow(self._next_seq, task_id, "")
        self._next_seq += 1
        return row, self._remember(EndedTask(row.seq, task_id, ""))

    def _remember(self, ended: EndedTask) -> list[EndedTask]:
        self.ended[ended.task_id] = ended
        forgotten = []
        while len(self.ended) > self._finished_limit:
            oldest = self.ended.popitem(last=False)[1]
            self._unindex(oldest.group_id, oldest.task_id)
            forgotten.append(oldest)
        return forgotten

    def forget(self, task_id: str) -> None:
        """Drop a task, which is nowhere queued, without remembering it."""
        known = self.live.pop(task_id, None) or self.ended.pop(task_id)
        self._unindex(known.group_id, task_id)

    def group(self, group_id: str) -> list[str]:
        """Ids of the group's tasks, live and ended, in the order of their submission."""
        return list(self._groups.get(group_id, ()))

    def out_of_grace(self, now: float) -> list[LiveTask]:
        return [task for task in self.grace.values() if task.grace_until is not None and task.grace_until <= now]

    def restore(self, snapshot: Snapshot, now: float, grace_s: dict[str, float]) -> None:
        for row in sorted(snapshot.rows, key=lambda row: row.order):
            self._next_seq = max(self._next_seq, row.seq + 1)
            self._next_order = max(self._next_order, row.order + 1)
            self._index(row.group_id, row.task_id)
            if row.hardware and self.pins.pin(row.group_id, row.hardware):
                self.pins.timed(row.group_id)
            if row.stage:
                self._revive(row, now, grace_s[row.stage])
            else:
                self.ended[row.task_id] = EndedTask(row.seq, row.task_id, row.group_id)

    def _revive(self, row: TaskRow, now: float, grace_s: float) -> None:
        task = LiveTask(
            row.seq,
            row.task_id,
            row.stage,
            row.group_id,
            row.max_staleness,
            row.status,
            row.version,
            row.losses,
            row.order,
            now,
            needs=row.needs,
            hardware=row.hardware,
        )
        self.live[task.task_id] = task
        if row.leased:
            task.grace_until = now + grace_s
            self.grace[task.task_id] = task
        else:
            self.queues[task.stage].add(task)

    def _index(self, group_id: str, task_id: str) -> None:
        if group_id:
            self._groups.setdefault(group_id, {})[task_id] = None

    def _unindex(self, group_id: str, task_id: str) -> None:
        members = self._groups.get(group_id)
        if members is not None:
            members.pop(task_id, None)
            if not members:
                del self._groups[group_id]

    def __iter__(self) -> Iterator[LiveTask]:
        return iter(self.live.values())
