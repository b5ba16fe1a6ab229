"""What was started for the next candidate can be waited for."""

from __future__ import annotations

import random
from typing import Any, cast

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify.device import Device
from kbrl_async.kernels.verify.options import bench_options
from kbrl_async.kernels.verify.references import References


class Settling(Device):
    """Counts how often it was asked to settle."""

    times = 0

    def settle(self) -> None:
        self.times += 1


def test_references_settle_the_children_that_wait() -> None:
    waiting = Settling("cpu")
    References(cast(Any, None), bench_options(TimingBench()), random.Random(0), waiting).settle()
    assert waiting.times == 1
