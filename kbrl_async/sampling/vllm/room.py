"""Room on the GPU for vLLM, which takes its share at its start or not at all; who holds some may give it back soon.

::

    a bench at work, an engine that was killed ─ memory ─▶ wait_for_room ─▶ vLLM
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from kbrl_async.errors import HostError

PATIENCE_S = 60.0
LOOK_S = 0.5
CONTEXT_BYTES = 1 << 30
"""Of CUDA and its libraries, beside the share."""


class Memory(NamedTuple):
    """Bytes of one GPU."""

    free: int
    total: int


def memory_now(environment: Mapping[str, str] = os.environ) -> Memory | None:
    """Of the first GPU that this process sees; None where the driver does not say."""
    import pynvml

    name = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        pynvml.nvmlInit()
        by_name = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        found = pynvml.nvmlDeviceGetMemoryInfo(by_name(int(name) if name.isdigit() else name))
    except pynvml.NVMLError:
        return None
    return Memory(int(found.free), int(found.total))


async def wait_for_room(
    share: float,
    told: Callable[[str], None],
    look: Callable[[], Memory | None] = memory_now,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Until `share` of the GPU is free. `told` hears once that it waits; HostError after `PATIENCE_S`."""
    until, has_told = clock() + PATIENCE_S, False
    while (memory := look()) is not None and memory.free < share * memory.total + CONTEXT_BYTES:
        lacking = f"{share:.0%} of its {memory.total / 2**30:.1f} GiB, and {memory.free / 2**30:.1f} GiB are free"
        if clock() >= until:
            cure = "Lower sampler.memory_share or processes.timing_bench; nvidia-smi lists who holds it"
            raise HostError(f"vLLM needs a GPU with {lacking}, after {PATIENCE_S:.0f} s", cure)
        if not has_told:
            told(f"waiting for room on the GPU: {lacking}")
            has_told = True
        await pause(LOOK_S)
