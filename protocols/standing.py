"""What the ledger says of itself: how long its queues are, who works, and what nobody can do. Plain values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from protocols import messages as msg
from protocols.leases import PoolWorker, WorkerPool
from protocols.queues import STAGES, TaskTable


def standing(tasks: TaskTable, pool: WorkerPool, now: float) -> dict[str, object]:
    """Depth and age of each queue, tasks in flight, and every worker."""
    found = stages(tasks, pool, 0, now)
    return {
        "queues": {stage.stage: stage.queued for stage in found},
        "in_flight": {stage.stage: stage.in_flight for stage in found},
        "oldest_s": {stage.stage: stage.oldest_s for stage in found},
        "workers": {worker.worker_id: _describe(worker) for worker in pool.by_id.values()},
    }


def unserved(since: Mapping[tuple[str, str], float], tasks: TaskTable, now: float) -> list[dict[str, object]]:
    """What waits at a stage whose workers all lack what it needs."""
    return [
        {"stage": stage, "needs": needs, "tasks": tasks.queues[stage].waiting(needs), "for_s": round(now - begun, 3)}
        for (stage, needs), begun in since.items()
    ]


def _describe(worker: PoolWorker) -> dict[str, object]:
    return {
        "stages": list(worker.stages),
        **msgspec.structs.asdict(worker.load),
        "leases": len(worker.leases),
        "suspect": worker.suspect,
    }


def stages(tasks: TaskTable, pool: WorkerPool, policy_version: int, now: float) -> list[msg.StageStanding]:
    """Each stage for a viewer. Reads only."""
    in_flight = dict.fromkeys(STAGES, 0)
    lags: dict[str, list[int]] = {stage: [] for stage in STAGES}
    for task in tasks:
        in_flight[task.stage] += task.lease is not None or task.grace_until is not None
        if task.version >= 0:
            lags[task.stage].append(policy_version - task.version)
    return [_stage(stage, tasks, pool, in_flight[stage], lags[stage], now) for stage in STAGES]


def _stage(
    stage: str, tasks: TaskTable, pool: WorkerPool, in_flight: int, lags: list[int], now: float
) -> msg.StageStanding:
    oldest = tasks.queues[stage].oldest()
    serving = [worker for worker in pool.by_id.values() if stage in worker.stages]
    return msg.StageStanding(
        stage,
        len(tasks.queues[stage]),
        in_flight,
        round(max(0.0, now - oldest.entered_at), 3) if oldest else 0.0,
        len(serving),
        sum(min(worker.slots, worker.credit) for worker in serving if not worker.suspect),
        round(sum(lags) / len(lags), 3) if lags else 0.0,
        max(lags, default=0),
    )


def workers(pool: WorkerPool, now: float) -> list[msg.WorkerStanding]:
    """Each worker for a viewer. Reads only."""
    return [
        msg.WorkerStanding(
            worker.worker_id,
            list(worker.stages),
            worker.slots,
            worker.credit,
            len(worker.leases),
            worker.suspect,
            round(max(0.0, now - worker.last_seen), 3),
            worker.load,
        )
        for worker in pool.by_id.values()
    ]
