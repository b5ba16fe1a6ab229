"""vLLM's scheduler: held still, for whatever reasons there are at once, and what it tells after every step.

::

    hold("update") ─▶ pause_generation(mode="keep")   in flight is frozen, and goes on when all reasons are gone
                      pause_generation()              older: in flight ends as aborted; the engine continues each
                      abort(ids)                      without it: the same, and the prefix cache is reset by hand

Invariant: after `hold` nothing is computed and every token so far has reached the engine.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from kbrl_async.sampling.engine import EngineStats

QUIET_TURNS = 20
"""Turns of the loop without a new token after which none is on its way: vLLM has sent all before it answers a pause,
and its handler passes on at least one batch a turn."""


class Pausing:
    """One engine's scheduler."""

    def __init__(self, llm: Any, *, keep_kv: bool) -> None:
        self._llm, self._keep_kv = llm, keep_kv
        pause = getattr(llm, "pause_generation", None)
        self._pause = pause
        self.freezes = pause is not None and "mode" in inspect.signature(pause).parameters
        """Requests in flight stay in the engine; else they end as aborted, and are continued as new ones."""
        self._reasons: set[str] = set()
        self._running: set[str] = set()
        self._lock = asyncio.Lock()

    def began(self, request_id: str) -> None:
        self._running.add(request_id)

    def ended(self, request_id: str) -> None:
        self._running.discard(request_id)

    async def hold(self, reason: str, received: Callable[[], int]) -> None:
        """`received`: tokens that have come so far."""
        async with self._lock:
            is_update = reason == "update"
            if not self._reasons or is_update:
                await self._hold(clear=is_update and not self._keep_kv)
            self._reasons.add(reason)
        quiet, before = 0, received()
        while quiet < QUIET_TURNS:
            await asyncio.sleep(0)
            quiet, before = (quiet + 1, before) if received() == before else (0, received())

    async def let_go(self, reason: str) -> None:
        async with self._lock:
            if reason not in self._reasons:
                return
            self._reasons.discard(reason)
            if not self._reasons and self._pause is not None:
                await self._llm.resume_generation()

    async def _hold(self, *, clear: bool) -> None:
        if self._pause is None:
            await self._llm.abort(list(self._running))
            await self._llm.reset_prefix_cache()
        elif self.freezes:
            # Cleared, the sequences in flight compute their keys and values anew: all of one version.
            await self._pause(mode="keep", clear_cache=clear)
        else:
            await self._pause()


class Meter:
    """A stat logger of vLLM's, as `AsyncLLM(stat_loggers=[…])` makes and calls it. Its structs are not stable between
    versions: what is missing counts as 0.
    """

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        self.tick = tick
        """Called after every step that wrote tokens."""
        self.preemptions = 0
        self.decode_steps = self.generated_tokens = self.prefill_tokens = self.cached_tokens = 0
        self._queued: dict[int, int] = {}
        self._kv_usage: dict[int, float] = {}

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> Meter:
        """The factory that vLLM asks for is the meter itself, for all its engine cores (data parallelism)."""
        return self

    @property
    def waiting(self) -> int:
        return sum(self._queued.values())

    @property
    def kv_usage(self) -> float:
        """Of the engine core that has the least left."""
        return max(self._kv_usage.values(), default=0.0)

    def stats(self, own: EngineStats) -> EngineStats:
        """What the engine counts itself, with what vLLM's scheduler says."""
        return msgspec.structs.replace(
            own,
            waiting=self.waiting,
            decode_steps=self.decode_steps,
            prefill_tokens=self.prefill_tokens,
            kv_usage=self.kv_usage,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
        )

    def saw(self, waiting: int, kv_usage: float, engine_idx: int = 0) -> None:
        self._queued[engine_idx], self._kv_usage[engine_idx] = waiting, kv_usage

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            waiting = getattr(scheduler_stats, "num_waiting_reqs", 0)
            self.saw(waiting, getattr(scheduler_stats, "kv_cache_usage", 0.0), engine_idx)
            self.cached_tokens += getattr(getattr(scheduler_stats, "prefix_cache_stats", None), "hits", 0)
        if iteration_stats is not None:
            self.decode_steps += 1
            self.generated_tokens += getattr(iteration_stats, "num_generation_tokens", 0)
            self.prefill_tokens += getattr(iteration_stats, "num_prompt_tokens", 0)
            self.preemptions += getattr(iteration_stats, "num_preempted_reqs", 0)
            self.tick()

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None: ...
