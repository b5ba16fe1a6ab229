"""What is ours in vLLM's workers, one a GPU: mixed in by `worker_extension_cls`, called by `collective_rpc`.

Every worker gets whole tensors from the learner, and vLLM's own `load_weights` takes the part that is this worker's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kbrl_async.errors import InfraError

QUALIFIED = f"{__name__}.WorkerExtension"
POLL_S = 0.5


class WorkerExtension:
    """See `end_with` and `weights.direct`."""

    rank: int
    """Of this worker in its engine: vLLM's."""
    model_runner: Any
    device: Any
    vllm_config: Any
    _incoming: Any = None

    def die_with(self, owner: int) -> None:
        """End this process, and the engine core above it, once process `owner` is gone. A worker must not outlive the
        sampler, or the next one finds the GPU's memory taken: `kill -9` leaves nobody to stop it, and vLLM's processes
        notice late or never."""
        threading.Thread(target=watch, args=(owner,), name="die-with-owner", daemon=True).start()

    def meet_learner(self, meeting: bytes, link: int, size: int, patience_s: float) -> str:
        """Joins the learner's group, in place of an earlier one. Why it could not: see `_reported`."""
        from kbrl_async.weights.groups import Incoming, Meeting

        if self._incoming is not None:
            self._incoming.close()
        where = msgspec.json.decode(meeting, type=Meeting)
        parallel = self.vllm_config.parallel_config
        rank = 1 + parallel.data_parallel_rank * parallel.world_size + self.rank

        def join() -> None:
            self._incoming = Incoming(where, link, rank, size, self.device, patience_s)

        return self._reported(join)

    def receive_weights(self, offer: bytes) -> str:
        """What the group sends now, tensor by tensor, into the model in place. Why it broke off: see `_reported`."""
        from kbrl_async.weights.groups import TransferOffer

        index = msgspec.msgpack.decode(offer, type=TransferOffer).index

        def take() -> None:
            for named in self._incoming.tensors(index):
                self.model_runner.model.load_weights([named])

        return self._reported(take)

    def _reported(self, work: Callable[[], None]) -> str:
        """Why it failed, "" if it didn't: returned, not raised. Where one of several workers raises, vLLM answers at
        once and takes what the others say for answers to its next call. Of several copies of the model vLLM returns
        only the first one's answer, so there it is raised."""
        try:
            work()
        except InfraError as error:
            if self.vllm_config.parallel_config.data_parallel_size > 1:
                raise
            return error.cause
        return ""


def watch(owner: int, end: Callable[[], object] | None = None, period_s: float = POLL_S) -> None:
    while _lives(owner):
        time.sleep(period_s)
    (end or _end)()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end() -> None:
    core = os.getppid()  # with several workers the engine core is a process of its own above them
    if core > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os._exit(1)
