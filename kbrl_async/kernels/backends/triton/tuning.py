"""Autotuning has a budget of its own, on the farm: what it does not compile in that time is not tried on the bench.

::

    farm: each configuration compiled, until `compile_farm.tuning_s` are spent ─▶ bundle, with their names beside
    bench: the tuner times those at the first call, and keeps the fastest for all that follow; others count as endless
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

FILE = "tuned.configs"
"""In the bundle: by a tuner's name what was compiled, where that is not all."""
_NEVER = [float("inf")] * 3
Made = TypeVar("Made")


def is_tuned(source: str) -> bool:
    """Whether it may be, by its text and that of its helper modules."""
    return "tune" in source


class TuningBudget:
    """Of one farm child. One configuration of each tuner is compiled whatever it takes."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock = seconds, clock
        self._compiled: dict[str, list[str]] = {}
        self.left_out = 0

    def compile(self, tuner: Any, config: Any, make: Callable[[], Made]) -> Made | None:
        """What `make` gives; None where nothing is left. What it raises passes through, and has cost its time."""
        done = self._compiled.setdefault(_name(tuner), [])
        if done and self._left <= 0:
            self.left_out += 1
            return None
        begin = self._clock()
        try:
            made = make()
        finally:
            self._left -= self._clock() - begin
        done.append(str(config))
        return made

    @property
    def note(self) -> str:
        """For people; empty where everything was compiled."""
        if not self.left_out:
            return ""
        return f"tuned over {sum(map(len, self._compiled.values()))} configurations, {self.left_out} left out for time"

    def file(self) -> dict[str, bytes]:
        return {FILE: msgspec.msgpack.encode(self._compiled)} if self.left_out else {}

    def watch(self) -> None:
        """Tuners that bring a `run` of their own time configurations through `_bench`."""
        from triton.runtime.autotuner import Autotuner

        bench = Autotuner._bench

        def limited(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
            return self.compile(tuner, config, lambda: bench(tuner, *args, config=config, **meta)) or _NEVER

        Autotuner._bench = limited


def only_compiled(files: dict[str, bytes]) -> None:
    """On the bench, before the candidate's source runs."""
    known = msgspec.msgpack.decode(files[FILE], type=dict[str, list[str]]) if FILE in files else {}
    if not known:
        return
    from triton.runtime.autotuner import Autotuner

    bench = Autotuner._bench

    def limited(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
        names = known.get(_name(tuner))
        return _NEVER if names and str(config) not in names else bench(tuner, *args, config=config, **meta)

    Autotuner._bench = limited


def _name(tuner: Any) -> str:
    return str(getattr(tuner.base_fn, "__name__", ""))
