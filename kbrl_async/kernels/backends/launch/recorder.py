"""Proof that a candidate's own kernels run: every launcher passes its launches through `RECORDER.call`.

The runner records during one untimed call (how often and how long each kernel ran), and switches all kernels off during
another: an output that is still right then never needed them.

Invariants
* Off, it costs one comparison a launch.
* A launch that raised is not counted: a fallback around a failing kernel is no launch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbrl_async.kernels.backends.launch.stand_ins import StandIns  # needs torch

_now = time.thread_time_ns  # CPU time of this thread: others on the core must not look like a slow kernel


class LaunchCounter:
    """Launches by kernel name, as (count, nanoseconds of CPU time), while `is_on`; none at all while `is_muted`."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_muted = False
        self.depth = 0
        """> 0 inside a launch, while recording."""
        self.launches: dict[str, tuple[int, int]] = {}
        self.ops: dict[str, tuple[int, int]] = {}
        """The library's operators, by whoever sees them."""
        self.unseen = ""
        """An operator of the library's in a CUDA graph of the candidate's own: of its result nobody hears."""
        self.place: Callable[[], int] | None = None
        """While a CUDA graph is captured: how many nodes it has by now."""
        self.spans: list[tuple[int, int]] = []
        """First and last+1 of the nodes that each launch made there."""
        self.stand_ins: StandIns | None = None
        """What the results of functions were while recording, and what those give instead that are left out."""
        self.tape: Callable[[Any, tuple[Any, ...], list[Any]], None] | None = None
        """Hears of each call of a built C function, before it: the function, its arguments, and what C gets of them; of
        kernels on a GPU, only what they are given."""

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, counted under `name` while recording."""
        if not self.is_on:
            return function(*args)
        if self.is_muted:
            self._count(name, 0)
            return None if self.stand_ins is None else self.stand_ins.give(name, function, args)
        first = self.place() if self.place else 0
        self.depth += 1
        begin = _now()
        try:
            result = function(*args)
        finally:
            spent = _now() - begin
            self.depth -= 1
        if self.place:
            self.spans.append((first, self.place()))
        if self.stand_ins is not None and not self.depth:
            self.stand_ins.note(name, function, args, result)
        self._count(name, spent)
        return result

    def proven(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call` of a function that is given tensors: what those are is heard of."""
        if self.tape is not None:
            self.tape(function, (*args, *kwargs.values()), [])
        return self.call(name, functools.partial(function, **kwargs) if kwargs else function, *args)

    def _count(self, name: str, spent: int) -> None:
        count, before = self.launches.get(name, (0, 0))
        self.launches[name] = (count + 1, before + spent)


RECORDER = LaunchCounter()
