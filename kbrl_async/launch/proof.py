"""Proof that a candidate's own kernels run: every launcher passes its launches through `call`, and the runner records
them during one untimed call. It says how often and how long they ran; a decoy that never runs can't hide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Recorder:
    """Launches by kernel name, as (count, nanoseconds), while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.launches: dict[str, tuple[int, int]] = {}

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, counted under `name` while recording."""
        if not self.is_on:
            return function(*args)
        begin = time.perf_counter_ns()
        try:
            return function(*args)
        finally:
            count, spent = self.launches.get(name, (0, 0))
            self.launches[name] = (count + 1, spent + time.perf_counter_ns() - begin)


RECORDER = Recorder()
