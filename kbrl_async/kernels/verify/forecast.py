"""How long a verification will take: told once two of its sets are made, where it is long."""

from __future__ import annotations

import time
from collections.abc import Callable

from kbrl_async.kernels.stages import tell
from kbrl_async.kernels.verify.options import Tick

TOLD_S = 5.0
"""Less is not worth a word."""
_KEPT, _ASKED = 1.5, 3.0
"""A whole verification, in times of its sets' making: a candidate's answers and comparisons come to half of that; where
no set is kept, each is made again when it is compared, and for the mixtures that timed inputs are."""


def forecast(tick: Tick, problem_id: str, sets: int, are_kept: Callable[[], bool]) -> Tick:
    """`tick` for the beginning of each of `sets` sets; at the third it is known how long one takes. The first
    one warms up what it needs, so the shorter of two counts.
    """
    marks: list[float] = []

    def ticked() -> None:
        marks.append(time.perf_counter())
        if len(marks) == 3:
            about = min(marks[1] - marks[0], marks[2] - marks[1]) * sets * (_KEPT if are_kept() else _ASKED)
            if about >= TOLD_S:
                one = "" if are_kept() else ", one input set in memory at a time"
                tell(f"{problem_id} is large: about {about:.0f} s{one}")
        tick()

    return ticked
