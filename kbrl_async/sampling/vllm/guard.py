"""In vLLM's worker process: it must not outlive the sampler, or the next one finds the GPU's memory taken.

`kill -9` of the sampler leaves nobody to stop its children, and vLLM's notice late or never. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

QUALIFIED = "kbrl_async.sampling.vllm.guard.Guarded"
POLL_S = 0.5


class Guarded:
    """Mixed into vLLM's worker by `worker_extension_cls`; called by `collective_rpc`."""

    def die_with(self, owner: int) -> None:
        """End this process, and the engine core above it, once process `owner` is gone."""
        threading.Thread(target=watch, args=(owner,), name="die-with-owner", daemon=True).start()


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
