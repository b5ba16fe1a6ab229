"""Which bench has a group's reference already: making one takes seconds, so a group's tasks go where it is.

::

    a free bench, the oldest tasks ─▶ one of a group that it has served ─▶ one of a group that nobody has ─▶ the oldest

Where a run asks for it, those that are alike in this go by the chance that a value model gives them, the likely first.

Invariants
* A free bench gets a task whenever there is one that it can do: nobody waits for a reference.
* The oldest task is passed over at most `PATIENCE` times, so no group waits for a bench that is slow or gone. Where
  chances count, so is every task that is looked at: then no unlikely one waits for more than so many younger ones.
* What is remembered is bounded by the workers that are there; after a restart it is nothing, which costs references.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from protocols.leases import LiveTask

LOOK = 64
"""Tasks that are looked at, from the oldest on."""
PATIENCE = 32
KEPT = 4
"""Groups of a worker that are remembered: as many references as a bench on a GPU keeps at most, each a process with a
context and, of large problems, gigabytes. A bench on a CPU keeps more."""


class Affinity:
    """::

    chosen = affinity.choose(oldest, others_it_can_do, "bench-1")
    affinity.served("bench-1", chosen.group_id)
    """

    def __init__(self) -> None:
        self._groups: dict[str, OrderedDict[str, None]] = {}
        """By worker, newest last."""
        self._homes: Counter[str] = Counter()
        """How many workers have a group."""

    def choose(
        self, oldest: LiveTask, others: Iterable[LiveTask], worker_id: str, likely_first: bool = False
    ) -> LiveTask:
        """The task for this worker: `oldest`, or one of `others`."""
        own: OrderedDict[str, None] = self._groups.get(worker_id, OrderedDict())
        is_settled = not oldest.group_id or oldest.group_id in own
        if oldest.passed_over >= PATIENCE or (is_settled and not likely_first):
            return oldest

        def cost(task: LiveTask) -> tuple[int, float, int]:
            group = task.group_id
            return 0 if group in own else 1 if group not in self._homes else 2, -task.chance, task.order

        waiting = [oldest, *others]
        chosen = min(waiting, key=cost)
        for task in waiting if likely_first else [oldest]:
            task.passed_over += task is not chosen and (task is oldest or task.order < chosen.order)
        return chosen

    def served(self, worker_id: str, group_id: str) -> None:
        """The worker has got a task of this group."""
        if not group_id:
            return
        own = self._groups.setdefault(worker_id, OrderedDict())
        if group_id not in own:
            self._homes[group_id] += 1
        own[group_id] = None
        own.move_to_end(group_id)
        while len(own) > KEPT:
            self._leave(own.popitem(last=False)[0])

    def gone(self, worker_id: str) -> None:
        for group_id in self._groups.pop(worker_id, ()):
            self._leave(group_id)

    def _leave(self, group_id: str) -> None:
        self._homes[group_id] -= 1
        if not self._homes[group_id]:
            del self._homes[group_id]
