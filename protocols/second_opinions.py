"""The ledger's part for second opinions: when a result waits for another's, and what a comparison sets off.

`checking.CheckDesk` decides, this module moves the tasks: at `compile` and at `bench`, each stage for itself. A result
that waits is in no queue and under no lease. Pure.

Invariant: two opinions agree only where they also send the task to the same stage; the believed one's is where it goes.
"""

from __future__ import annotations

from protocols import events as ev
from protocols import messages as msg
from protocols.leases import LiveTask
from protocols.messages import Stage, Status
from protocols.moves import Moves

CHECKED = frozenset({Stage.COMPILE, Stage.VERIFY, Stage.BENCH})
"""Stages whose results others can find too."""
QUARANTINED = "refused: quarantined, its results differ from those of others"


class SecondOpinions:
    """See the module's docstring."""

    def __init__(self, moves: Moves) -> None:
        self._moves, self._tasks, self._pool, self._checks = moves, moves.tasks, moves.pool, moves.checks

    def is_checked(self, task: LiveTask, result: msg.Result, principal: str) -> bool:
        """True where a result does not go on at once: it is held, or somebody else does the work too."""
        if not self._checks.is_on or task.stage not in CHECKED or not result.next_stage or not principal:
            return False
        barred = task.barred | {principal}
        verdict = self._checks.opinion(task.task_id, principal, self._pool.others(task, barred), self._moves.now)
        if verdict == "pass":
            return False
        task.barred = barred
        task.opinions = (*task.opinions, result.next_stage)
        task.fenced |= {result.lease_id}
        self._moves.out.append(ev.Opinion(task.task_id, len(self._checks.cases[task.task_id].principals) - 1))
        self._moves.out.append(ev.Update(task.row()))
        if verdict == "compare":
            self._moves.out.append(ev.Compare(task.task_id))
        elif verdict == "check":
            self._tasks.give_back(task)
        return True

    def compared(self, event: ev.Compared) -> None:
        task = self._tasks.live.get(event.task_id)
        if task is None or task.task_id not in self._checks.cases:
            return
        agree = [(i, j) for i, j in event.agree if task.opinions[i] == task.opinions[j]]
        found = self._checks.compared(task.task_id, agree, self._pool.others(task, task.barred))
        if found.more:
            self._tasks.give_back(task)
        elif found.winner >= 0:
            self._settle(task, found.winner)
        else:
            self._moves.give_up(task, Status.WORKER_LOST)
        for task_id in found.release:
            self._settle(self._tasks.live[task_id], 0)
        for task_id in found.redo:
            self._do_again(self._tasks.live[task_id])
        if found.quarantine:
            self._quarantine(found.quarantine)

    def look_after(self) -> None:
        """Nothing waits for ever: what is due is checked now, or goes on where nobody could check it."""
        for task_id, case in self._checks.due(self._moves.now):
            task = self._tasks.live[task_id]
            if task.lease is not None:
                continue
            if not self._pool.others(task, task.barred):
                self._checks.let_go(task_id)
                self._settle(task, 0)
            elif not case.checking:
                self._checks.check_now(task_id, self._moves.now)
                self._tasks.give_back(task)

    def _settle(self, task: LiveTask, opinion: int) -> None:
        self._tasks.take_out(task)
        task.status = Status.OK
        self._tasks.enter(task, task.opinions[opinion], self._moves.now)
        self._moves.out.append(ev.Settle(task.row(), opinion))

    def _do_again(self, task: LiveTask) -> None:
        """Its opinion is not believed: others do it as if nobody had, as far as there are any."""
        task.opinions = ()
        if not self._pool.others(task, task.barred):
            task.barred = frozenset()
        self._moves.out.append(ev.Update(task.row()))
        self._tasks.give_back(task)

    def _quarantine(self, principal: str) -> None:
        self._moves.out.append(ev.Quarantine(principal))
        for worker in [worker for worker in self._pool.by_id.values() if worker.principal == principal]:
            for lease in list(worker.leases.values()):
                self._moves.revoke(lease, QUARANTINED)
                self._moves.requeue(lease.task)
                lease.task.fenced |= {lease.lease_id}
            self._moves.send(worker, msg.Drain(QUARANTINED))
            self._moves.remove(worker)
