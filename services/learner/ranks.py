"""A learner of several processes: rank 0 speaks the protocol and starts the others, which only compute.

::

    nanny ─▶ rank 0 (queues, checkpoints, versions) ─▶ rank 1 … n−1    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
       ▲                     │ a rank has ended: all end
       └── starts all again ─┘

Invariants
* No rank outlives rank 0 (PR_SET_PDEATHSIG), and rank 0 outlives none: a collective with a dead rank never returns.
* A launcher that sets RANK itself, such as torchrun, is left alone: nothing is started then, and it takes the nanny's
  place. A rank that ended must start again together with all others, on all hosts, which a nanny of rank 0 alone can't
  do. What a launcher asks to end is gone in `LEAVE_S`: in a collective with a dead rank nobody hears a signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kbrl_async.errors import ConfigError
from services.runtime.nanny import CHILD_MARK, STOP_GRACE_S

if TYPE_CHECKING:
    import torch

    from kbrl_async.learning.distributed import ProcessGroup

LOOK_S = 0.5
END_S = 3.0
LEAVE_S = STOP_GRACE_S + 0.5
LAUNCHED = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOST = 1
"""Exit code that has the nanny start all ranks again."""


def is_follower() -> bool:
    return os.environ.get("RANK", "0") != "0"


def is_launched() -> bool:
    """A launcher has started all ranks. Ask before `start`, which makes ranks of its own."""
    return "RANK" in os.environ


def leave_out_nanny() -> None:
    """Has `run_service` run the service itself: a launcher starts all ranks again when one ends."""
    os.environ[CHILD_MARK] = str(os.getppid())


def leave_in_time() -> None:
    """A follower, before its first thread: rank 0 says when it is over; if it doesn't, it ends `LEAVE_S` after the
    first signal. By a thread: Python's handlers wait for the main one, which waits in a collective."""
    asked = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)

    def leave() -> None:
        signal.sigwait(asked)
        time.sleep(LEAVE_S)
        os._exit(LOST)

    threading.Thread(target=leave, daemon=True).start()


async def leave_after(stop: asyncio.Event) -> None:
    """The same for rank 0, where no nanny kills it."""
    await stop.wait()
    await asyncio.sleep(LEAVE_S)
    os._exit(LOST)


def check_launcher(count: int, environment: Mapping[str, str] = os.environ) -> None:
    """:raises ConfigError: a launcher has started something else than `learner.processes` ranks."""
    if "RANK" not in environment:
        return
    lacking = [name for name in LAUNCHED if name not in environment]
    if lacking:
        cure = "Start all ranks by torchrun, or unset RANK: learner.processes starts them without a launcher"
        raise ConfigError(f"RANK is set and {', '.join(lacking)} is not", cure)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        cause = "torchrun keeps one store over its restarts, where ranks that start again find addresses of dead ones"
        raise ConfigError(cause, "Start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment")
    if (size := int(environment["WORLD_SIZE"])) != count:
        cure = f"Prepare the run with learner.processes={size}, or have torchrun start {count} on all hosts together"
        raise ConfigError(f"a launcher has started {size} ranks, and learner.processes={count}", cure)


def start(count: int, module: str = "services.learner") -> list[subprocess.Popen[bytes]]:
    """The other ranks on this host, and this process's place among them in its environment."""
    check_launcher(count)
    if "RANK" in os.environ or count < 2:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    command = [sys.executable, "-m", module]
    made = []
    for rank in range(1, count):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "HONCHO_PROCESS_NAME": f"learner.rank{rank}"}
        made.append(subprocess.Popen(command, env={**os.environ, **mine}))
    return made


async def watch(ranks: list[subprocess.Popen[bytes]], log: Any) -> None:
    """Ends this process as soon as another rank has ended."""
    while ranks:
        await asyncio.sleep(LOOK_S)
        for number, rank in enumerate(ranks, 1):
            if (code := rank.poll()) is not None:
                log.error("a rank of the learner has ended; all start again", rank=number, code=code)
                os._exit(LOST)  # threads may wait in a collective for ever


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """After the process group was closed."""
    for rank in ranks:
        try:
            rank.wait(END_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def join(device: str) -> ProcessGroup | None:
    """The process group that the environment names, on this rank's device; None for a process that is alone."""
    if "RANK" not in os.environ:
        return None
    from kbrl_async.learning.distributed import ProcessGroup

    return ProcessGroup(place(device))


def place(device: str) -> torch.device:
    """This rank's GPU where there is one for each."""
    import torch

    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
