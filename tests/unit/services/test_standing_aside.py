"""A bench that stands still for another one leaves nothing at work on their GPU."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, cast

import pytest

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify.options import bench_options
from kbrl_async.kernels.verify.references import References
from protocols import messages as msg
from services.runtime.quiet import Gate
from services.timing_bench import stand_aside


class Settling:
    """Counts how often it was asked to settle."""

    times = 0

    def settle(self) -> None:
        self.times += 1


@pytest.mark.parametrize("is_paused", [False, True])
def test_what_was_started_for_the_next_candidate_ends_before_another_bench_times(is_paused: bool) -> None:
    async def play() -> int:
        bench, gate = Settling(), Gate(time.monotonic, lambda _: None, lambda: False)
        if is_paused:
            gate.handle(msg.Pause("q1", "gpu0", 600.0))
        stand_aside(gate, cast(Any, bench))
        return bench.times

    assert asyncio.run(play()) == int(is_paused)


def test_references_settle_the_children_that_wait() -> None:
    waiting = Settling()
    References(cast(Any, None), bench_options(TimingBench()), random.Random(0), cast(Any, waiting)).settle()
    assert waiting.times == 1
