"""Counters of the vLLM engine: what it has received, and the statistics that vLLM sends with each step."""

from __future__ import annotations

from typing import Any

from rollmesh.services.inference.engine import EngineLoad
from rollmesh.services.inference.engines.vllm.request import LiveRequest


class LoadCounts:
    """The counters. `stat_logger` is a factory for vLLM."""

    def __init__(self, *, slots_max: int) -> None:
        self._slots_max = slots_max
        self._num_generated = self._num_prefilled = self._num_hit = 0
        self._steps = self._num_preempted = 0
        self._cache_usage = 0.0
        self._cache_tokens = 0

    def set_cache(self, cache_config: Any) -> None:
        """Take the size of the key-value cache from vLLM's configuration."""
        self._cache_tokens = int(cache_config.num_gpu_blocks or 0) * int(cache_config.block_size)

    def generated(self, num_tokens: int) -> None:
        self._num_generated += num_tokens

    def ended(self, request: LiveRequest) -> None:
        """Count the prefix of a request."""
        if request.num_emitted:
            self._num_hit += request.num_cached
            self._num_prefilled += len(request.request.token_ids) - request.num_cached

    def load(self, *, num_running: int, num_waiting: int) -> EngineLoad:
        return EngineLoad(
            num_running=num_running,
            num_waiting=num_waiting,
            slots_max=self._slots_max,
            kv_tokens_used=round(self._cache_usage * self._cache_tokens),
            kv_tokens_max=self._cache_tokens,
            tokens_generated=self._num_generated,
            tokens_prefilled=self._num_prefilled,
            tokens_prefix_hit=self._num_hit,
            steps=self._steps,
            num_preempted=self._num_preempted,
        )

    def stat_logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """Return the object that vLLM calls after each step."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counts = self

        class StepCounts(StatLoggerBase):  # type: ignore[misc]
            """Passes vLLM's statistics on."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                counts.add_step(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None: ...

        return StepCounts(vllm_config, engine_index)

    def add_step(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if scheduler_stats is not None:
            self._cache_usage = float(scheduler_stats.kv_cache_usage)
        if iteration_stats is not None:
            self._steps += 1
            self._num_preempted += int(iteration_stats.num_preempted_reqs)
