"""What the ledger says of itself: how long its queues are, who works, and what nobody can do. Plain values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from protocols.leases import Worker, WorkerPool
from protocols.queues import STAGES, TaskTable


def standing(tasks: TaskTable, pool: WorkerPool, now: float) -> dict[str, object]:
    """Depth and age of each queue, tasks in flight, and every worker."""
    fronts = {stage: queue.oldest() for stage, queue in tasks.queues.items()}
    in_flight = dict.fromkeys(STAGES, 0)
    for task in tasks:
        in_flight[task.stage] += task.lease is not None or task.grace_until is not None
    return {
        "queues": {stage: len(queue) for stage, queue in tasks.queues.items()},
        "in_flight": in_flight,
        "oldest_s": {stage: round(now - task.entered_at, 3) if task else 0.0 for stage, task in fronts.items()},
        "workers": {worker.worker_id: _describe(worker) for worker in pool.by_id.values()},
    }


def unserved(since: Mapping[tuple[str, str], float], tasks: TaskTable, now: float) -> list[dict[str, object]]:
    """What waits at a stage whose workers all lack what it needs."""
    return [
        {"stage": stage, "needs": needs, "tasks": tasks.queues[stage].waiting(needs), "for_s": round(now - begun, 3)}
        for (stage, needs), begun in since.items()
    ]


def _describe(worker: Worker) -> dict[str, object]:
    return {
        "stages": list(worker.stages),
        **msgspec.structs.asdict(worker.load),
        "leases": len(worker.leases),
        "suspect": worker.suspect,
    }
