"""One vLLM engine for many tests, because a start takes 15 to 25 seconds. The suite vllm runs them in one event
loop."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.engine import VllmEngine

BLOCK_TOKENS = 32
"""Tokens of a block of the key-value cache."""
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not in this environment: run make suite NAME=vllm"
)
_open: dict[str, "SharedVllm"] = {}


class SharedVllm(VllmEngine):
    """An engine whose `start` only empties the cache after the first one."""

    def __init__(self, options: VllmEngineConfig) -> None:
        super().__init__(options)
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def usable(self) -> bool:
        return self.loop is asyncio.get_running_loop() and not self._broken

    async def start(self) -> None:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            await super().start()
        else:
            await self._llm.reset_prefix_cache()


def shared_vllm(model: Path, options: dict[str, Any]) -> tuple[VllmEngine, Callable[[Sequence[Any]], Awaitable[None]]]:
    """Return an engine and a function that ends its use. Engines of the default size are shared, if they are in the
    running loop."""
    key = str(sorted(options.items()))
    engine = _open.pop(key, None)
    if engine is None or not engine.usable:
        config = VllmEngineConfig(model=str(model), kv_bytes=1 << 28, arguments={"block_size": BLOCK_TOKENS}, **options)
        engine = SharedVllm(config)

    async def release(calls: Sequence[Any]) -> None:
        for call in calls:
            engine.cancel(call.request.request_id)
        for call in calls:
            await asyncio.wait_for(call.ended.wait(), 20)
        if options["slots_max"] == 16 and engine.active is not None and engine.usable:
            _open[key] = engine
        else:
            await engine.close()

    return engine, release
