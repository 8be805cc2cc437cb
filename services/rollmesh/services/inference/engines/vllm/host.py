"""Start and stop vLLM: its environment variables, its arguments, and a thread that owns its processes.

vLLM is imported in that thread at the start, not with this module. The import and the start take many seconds, during
which the event loop runs on. The kernel kills the engine core process when that thread ends (`plugin`), so the thread
lives until `stop`, and a killed node leaves no process. vLLM's workers end with the engine core.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from rollmesh.services.inference.engines.vllm import columns
from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.plugin import NODE
from rollmesh.services.inference.interpreter import no_vllm
from rollmesh.shared.domain.outputs import NUM_TOP_MAX
from rollmesh.shared.errors import ConfigError

BACKEND = "rollmesh_files"
"""Name of the transfer engine that `worker` registers."""
WORKER_EXTENSION = "rollmesh.services.inference.engines.vllm.worker.WorkerExtension"
_CPU_KV_BYTES = 1 << 30


def require_vllm() -> None:
    """Raise ConfigError if this interpreter has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise no_vllm(sys.executable)


class VllmHost:
    """vLLM's `AsyncLLM` and the thread that started it."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._stop = threading.Event()
        self._stopped: asyncio.Future[None] | None = None

    async def start(self, context_max: int, stat_logger: Callable[..., Any]) -> Any:
        """Return the running `AsyncLLM`. Raises ConfigError with vLLM's error if it does not start."""
        require_vllm()
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Any] = loop.create_future()
        self._stopped = loop.create_future()
        threading.Thread(
            target=self._run, args=(loop, started, self._stopped, context_max, stat_logger), name="vllm", daemon=True
        ).start()
        try:
            async with asyncio.timeout(self._config.start_s):
                return await started
        except TimeoutError as err:
            raise ConfigError(
                f"vLLM did not start within start_s = {self._config.start_s:g} s; its messages are in the log of this "
                "process",
                key="inference.engine",
            ) from err

    async def stop(self) -> None:
        """End vLLM's processes within about `close_s`."""
        self._stop.set()
        if self._stopped is not None:
            await asyncio.wait([self._stopped], timeout=self._config.close_s + 5.0)

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        started: asyncio.Future[Any],
        stopped: asyncio.Future[None],
        context_max: int,
        stat_logger: Callable[..., Any],
    ) -> None:
        try:
            llm = self._build(context_max, stat_logger)
        except Exception as err:  # noqa: BLE001 - vLLM may raise anything; the cause goes to the caller of `start`
            _post(loop, _fail, started, _why(err))
            _post(loop, _resolve, stopped, None)
            return
        _post(loop, _resolve, started, llm)
        self._stop.wait()
        llm.shutdown(timeout=self._config.close_s)
        _post(loop, _resolve, stopped, None)

    def _build(self, context_max: int, stat_logger: Callable[..., Any]) -> Any:
        _set_environment(self._config)
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            **engine_arguments(self._config, context_max, on_cpu=bool(current_platform.is_cpu())),
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger])


def engine_arguments(config: VllmEngineConfig, context_max: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`."""
    kv_bytes = config.kv_bytes or (_CPU_KV_BYTES if on_cpu else None)
    return {
        "disable_log_stats": True,  # its own log lines; the statistics go to the engine's logger
        "model": config.model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": config.dtype,
        # One more than the context, because vLLM wants room for a token after a prompt that is only scored.
        "max_model_len": context_max + 1,
        "max_num_seqs": config.slots_max + config.score_slots,
        "max_logprobs": columns.NUM_OUTPUTS + NUM_TOP_MAX,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "enforce_eager": config.eager,
        "gpu_memory_utilization": config.memory_share,
        **({"kv_cache_memory_bytes": kv_bytes} if kv_bytes else {}),
        **config.arguments,
    }


def _set_environment(config: VllmEngineConfig) -> None:
    """Set the variables that vLLM reads here and in its processes. Those that the user has set stay."""
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler is written for the other one
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with gRPC threads may deadlock
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(config.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        **({"TORCH_COMPILE_DISABLE": "1"} if config.eager else {}),
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    os.environ[NODE] = str(os.getpid())


def _why(err: Exception) -> ConfigError:
    return ConfigError(
        f"vLLM did not start: {type(err).__name__}: {err}; its messages are in the log of this process",
        key="inference.engine",
    )


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], err: Exception) -> None:
    if not future.done():
        future.set_exception(err)
