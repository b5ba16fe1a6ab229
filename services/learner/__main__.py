"""Learner: owns the policy's weights and versions. `python -m services.learner`

::

    train ─▶ [one update in a thread] ─▶ checkpoint ─▶ publish policy-v{n+1} ─▶ trained
    train, no groups: the run's end ─▶ newest version and its checkpoint on disk ─▶ trained

Invariants
* A batch enters the weights once: its id is in the checkpoint, and a batch that comes again is only answered (I1).
* The checkpoint is the truth and is written first; a version that a crash left unpublished is published at resume.

Torch's allocator takes a GPU's memory in segments that grow, unless somebody chose otherwise. Sequences of many lengths
leave gaps between blocks of fixed size, up to a third of what a learner's process took of a GPU; a segment that grows
maps memory where it is missing. Nothing of it crosses to another process: weights travel by NCCL and by files, whose
buffers are copied into.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import MutableMapping

from services.learner import ranks
from services.runtime.nanny import run_service
from services.runtime.service import choose_run, leave_out_traces

SETTING = "PYTORCH_CUDA_ALLOC_CONF"
NAMES = ("PYTORCH_ALLOC_CONF", SETTING, "PYTORCH_HIP_ALLOC_CONF")
"""Torch reads these once, before its first allocation."""
GROWING = "expandable_segments:True"


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """In a process that is still without torch, and in those that it starts.

    >>> found = {}
    >>> let_segments_grow(found)
    >>> found
    {'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'}
    """
    if not any(name in environment for name in NAMES):
        environment[SETTING] = GROWING


async def main(stop: asyncio.Event) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from protocols.messages import Stage, Task
    from protocols.records import TrainBatch, TrainGroup
    from services.learner.actor import Learning
    from services.runtime.pumping import watched
    from services.runtime.service import Service
    from services.runtime.worker import HandlerOutcome, Worker, WorkerOptions

    launched = ranks.is_launched()
    if launched:
        choose_run()
    service = Service.start("learner")
    loop = asyncio.get_running_loop()
    others = ranks.start(service.config.learner.processes)
    watching = asyncio.create_task(ranks.leave_after(stop) if launched else ranks.watch(others, service.log))
    pool = ThreadPoolExecutor(1)
    learning = await loop.run_in_executor(pool, Learning.open, service, stop.is_set)
    if learning is None:
        return
    batches = msgspec.msgpack.Decoder(TrainBatch)
    groups = msgspec.msgpack.Decoder(TrainGroup)

    async def train(task: Task, frames: list[bytes]) -> HandlerOutcome:
        batch = batches.decode(frames[0])
        members = [groups.decode(frame) for frame in frames[1:]]
        work = functools.partial(learning.train, batch, members) if members else functools.partial(learning.keep, batch)
        report = await loop.run_in_executor(pool, work, worker.breathe)
        tokens = int(report.metrics.get("input_tokens", 0))
        return HandlerOutcome(Stage.TRAINED, [msgspec.msgpack.encode(report)], report.policy_version, tokens=tokens)

    service.pin(service.layout.learner)
    worker = Worker(
        service.addresses.work,
        service.worker_id,
        [Stage.TRAIN],
        1,
        train,
        WorkerOptions(
            caps={} if learning.is_remote else service.quiet_caps(), policy_version=learning.version, wedge_s=120.0
        ),
        keys=service.keys,
    )
    service.watch(worker.meter)
    service.log.info("ready", policy_version=learning.version)
    try:
        await watched(asyncio.create_task(worker.run(stop)), [asyncio.create_task(learning.failed())])
    finally:
        if not launched:
            watching.cancel()
    await loop.run_in_executor(pool, learning.close)
    ranks.end(others)


if __name__ == "__main__":
    let_segments_grow(os.environ)
    leave_out_traces()
    if ranks.is_follower():
        from services.learner.follower import follow

        follow()
    if ranks.is_launched():
        ranks.leave_out_nanny()
    run_service("learner", main, choose_run)
