"""A learner of several ranks under its nanny, without queues: `python -m tests.unit.services.killed_ranks`.

Its folder is in RANKS_FOLDER, their number in RANKS. Nanny or launcher, ranks, shards and checkpoints are the learner's
own. Rank 0 stops after its second update until the test has killed another one, and then goes on into an update with a
rank that is not there. Where the folder says `killed` from the start, nobody is.

Four ranks a test would load transformers: their policy is of torch alone. Models of transformers on several ranks are
`tests/unit/learning/test_process_group.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import structlog

from services.learner import ranks
from services.runtime.nanny import die_with_parent, run_service

MODULE = "tests.unit.services.killed_ranks"
UPDATES = 4
KILL_AFTER = 2


def count() -> int:
    return int(os.environ["RANKS"])


def train(folder: Path, others: list[int]) -> None:
    import msgspec
    import torch
    from safetensors.torch import save_file

    from kbrl_async.learning import checkpoints
    from kbrl_async.learning.sharded import ShardedModel
    from kbrl_async.learning.trainer import Trainer
    from protocols.records import TrainGroup
    from tests.models import update_settings
    from tests.unit.services.plain_policy import PlainPolicy

    torch.set_num_threads(1)
    group = ranks.join("cpu")
    torch.manual_seed(0)
    policy = PlainPolicy()
    settings = update_settings(
        epochs=1, minibatches=2, learning_rate=1e-2, warmup_steps=0, token_budget=24, shard=True, processes=count()
    )
    sharded = None if group is None else ShardedModel(policy, group, offload=False)
    trainer = Trainer(policy, settings, "cpu", process_group=group, sharded=sharded)
    if group is not None and group.rank:
        (folder / f"follower-{group.rank}").write_text(str(os.getpid()))
        trainer.follow()
        trainer.close()
        return
    groups = msgspec.json.decode((folder / "groups.json").read_bytes(), type=list[TrainGroup])
    resumed = checkpoints.resume(folder / "checkpoints", trainer)
    version = resumed.progress.version if resumed else 0
    with (folder / "lives.jsonl").open("a") as lives:
        print(json.dumps({"from": version, "ranks": others}), file=lives)
    while version < UPDATES:
        trainer.step(groups, 0.7, version=version)
        version += 1
        checkpoints.save(
            folder / "checkpoints", trainer, checkpoints.LearnerProgress(version=version), keep_checkpoints=2
        )
        while version == KILL_AFTER and group is not None and not (folder / "killed").exists():
            time.sleep(0.02)
    weights = trainer.gathered_weights() or trainer.parameters.items()
    save_file({name: whole.detach().clone() for name, whole in weights}, folder / "weights.safetensors")
    trainer.close()


async def main(stop: asyncio.Event) -> None:
    launched = ranks.is_launched()
    started = ranks.start(count(), MODULE)
    started_pids = [rank.pid for rank in started]
    guard = ranks.leave_after(stop) if launched else ranks.watch(started, structlog.get_logger())
    watching = asyncio.create_task(guard)
    folder = Path(os.environ["RANKS_FOLDER"])
    await asyncio.get_running_loop().run_in_executor(None, train, folder, started_pids)
    watching.cancel()
    ranks.end(started)


if __name__ == "__main__":
    if ranks.is_follower():
        die_with_parent()
        ranks.leave_in_time()
        train(Path(os.environ["RANKS_FOLDER"]), [])
        os._exit(0)
    if ranks.is_launched():
        ranks.leave_out_nanny()
    run_service("learner", main)
