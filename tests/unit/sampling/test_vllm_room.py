"""vLLM waits for its share of the GPU, and says what keeps it."""

from __future__ import annotations

import asyncio

import pytest

from kbrl_async.errors import HostError
from kbrl_async.sampling.vllm.start import PATIENCE_S, Memory, memory_now, wait_for_memory

GIB = 1 << 30


def wait(share: float, *free_gib: float | None) -> tuple[list[str], int]:
    """What was said, and how often it looked; the last value stays."""
    told: list[str] = []
    looks, now = 0, 0.0

    def look() -> Memory | None:
        nonlocal looks
        free = free_gib[min(looks, len(free_gib) - 1)]
        looks += 1
        return None if free is None else Memory(int(free * GIB), 100 * GIB)

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    asyncio.run(wait_for_memory(share, told.append, look, pause, lambda: now))
    return told, looks


def test_a_gpu_with_room_is_taken_at_once() -> None:
    assert wait(0.35, 36.1) == ([], 1)


def test_it_waits_for_a_bench_that_gives_memory_back() -> None:
    told, looks = wait(0.35, 21.1, 30.0, 36.0)
    assert told == ["waiting for room on the GPU: 35% of its 100.0 GiB, and 21.1 GiB are free"]
    assert looks == 3


def test_it_does_not_wait_for_ever_and_says_what_to_change() -> None:
    with pytest.raises(HostError, match=r"35% of its 100\.0 GiB, and 21\.1 GiB are free, after 60 s") as caught:
        wait(0.35, 21.1)
    assert "sampler.memory_share" in str(caught.value)
    assert PATIENCE_S == 60.0


def test_a_driver_that_says_nothing_keeps_nobody() -> None:
    assert wait(0.9, None) == ([], 1)


def test_without_a_gpu_nothing_is_known() -> None:
    assert memory_now({"CUDA_VISIBLE_DEVICES": "17"}) is None
