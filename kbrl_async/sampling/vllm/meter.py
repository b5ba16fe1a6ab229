"""What vLLM tells of itself after every step: the engine's counters, and its sign of life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Meter:
    """A stat logger of vLLM's, as `AsyncLLM(stat_loggers=[…])` makes and calls it. Its structs are not stable between
    versions: what is missing counts as 0.
    """

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        self.tick = tick
        """Called after every step that wrote tokens."""
        self.running = self.waiting = self.preemptions = 0
        self.decode_steps = self.generated_tokens = self.prefill_tokens = self.cached_tokens = 0
        self.kv_usage = 0.0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> Meter:
        """The factory that vLLM asks for is the meter itself: there is one engine."""
        return self

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.running = getattr(scheduler_stats, "num_running_reqs", 0)
            self.waiting = getattr(scheduler_stats, "num_waiting_reqs", 0)
            self.kv_usage = getattr(scheduler_stats, "kv_cache_usage", 0.0)
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
