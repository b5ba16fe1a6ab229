"""A learner of two ranks that share a policy out and publish it, without queues: forked by

    python -m tests.unit.services.sending_ranks FOLDER

Rank 0 makes version after version, each once the file `next-N` is there, and says after the last that `over` is.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.engine import LocalEngine
from kbrl_async.runs.config import load
from kbrl_async.weights import Canaries
from kbrl_async.weights.groups import Meeting
from protocols.records import TrainGroup
from services.learner.policy import make_trainer, sender_of
from services.learner.publishing import Publisher
from tests.ports import free_port
from tests.unit.learning.rank import CANARY, settings
from tests.unit.services.log import Log

VERSIONS = 3
SIZE = 2
PATIENCE_S = 60.0


def lead(folder: Path, trainer: Any) -> None:
    groups = msgspec.json.decode((folder / "groups.json").read_bytes(), type=list[TrainGroup])
    policies = folder / "policies"
    engine = LocalEngine(trainer, str(folder / "base"), Canaries(CANARY, []), folder / "checkpoints", policies)
    words = ["weights.transport=direct", f"weights.stalled_s={PATIENCE_S:g}", "placement=split", "learner.shard=true"]
    config = load(overrides=[*words, f"learner.processes={SIZE}"])
    log = Log()
    if (folder / "out-of-reach").exists():
        trainer.meet = functools.partial(_out_of_reach, trainer.meet)
    service: Any = SimpleNamespace(config=config, device="cpu", log=log)
    publisher = Publisher(policies, sender_of(service, engine))
    held = []
    for version in range(VERSIONS):
        wait_for(folder / f"next-{version}")
        if version:
            trainer.step(groups, 0.7, version=version)
        publisher.free()
        pending = engine.publish(version, None)
        publisher.begin(pending, lambda: None)
        assert pending.weights is not None
        held.append(sum(tensor.numel() for tensor in pending.weights.values()))
    publisher.finish()
    wait_for(folder / "over")
    whole = sum(p.numel() for p in trainer.model.parameters())
    said = {"held": held, "whole": whole, "warned": [one.event for one in log.at("warning")]}
    (folder / "said.json").write_text(json.dumps(said))
    engine.close()
    publisher.close()


def _out_of_reach(
    meet: Callable[[Meeting, str, float], bool], meeting: Meeting, dtype: str, patience_s: float, **_: Any
) -> bool:
    """A port at which nobody listens, as behind a firewall between hosts."""
    return meet(msgspec.structs.replace(meeting, port=free_port()), dtype, 0.5)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until, f"no {path.name}"
        time.sleep(0.02)


def rank(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = ProcessGroup(torch.device("cpu"))
    trainer = make_trainer(settings("full"), folder / "base", "cpu", ranks)
    if not ranks.rank:
        lead(folder, trainer)
        return
    trainer.follow()
    trainer.close()


def fork(folder: Path) -> list[int]:
    """Exit codes of the ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(SIZE)}
    pids = []
    for number in range(SIZE):
        if pid := os.fork():
            pids.append(pid)
            continue
        os.environ["RANK"] = str(number)
        try:
            rank(folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    sys.exit(any(fork(Path(sys.argv[1]))))
