"""The vLLM engine: `AsyncLLM` behind the engine port. Tokens in, tokens and log-probs out.

vLLM runs the model, the key-value cache and the batch in its own processes. This class queues requests, so that vLLM
has at most `slots_max` of them, and none before the first weights. A sampler of the project runs in vLLM's workers
(`sampler`), so tokens depend on weights, prefix and seed only, as with the other engines.

    submit   -> queue -> a task per running request: add to vLLM -> outputs -> `LiveRequest` -> deltas
    prepare  -> check the files -> keep them (`prepared_files`)
    activate -> pause -> each worker loads the files (`weights`) -> drop or keep the cache -> emit the old tokens
             -> resume

Prefixes are salted with the serial number of the weights under which a request begins, so that its prompt is never read
from keys and values of other weights. A request without a token at an update begins again under the new weights, at
most `RESTARTS_MAX` times. After that it continues as one with tokens does, and `kv_step_oldest` is the step under which
it last began. An error in the middle of an update, or the end of a process of vLLM, breaks the engine: every live
request ends with ERROR, and later calls raise EngineBroken.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rollmesh.services.inference.engine import (
    Emit,
    Engine,
    EngineBroken,
    EngineBusy,
    EngineLoad,
    GenerateRequest,
    KvPolicy,
    ScoreResult,
)
from rollmesh.services.inference.engines.common.requests import check_request, check_retain, check_score
from rollmesh.services.inference.engines.common.stop import StopRules
from rollmesh.services.inference.engines.vllm import columns
from rollmesh.services.inference.engines.vllm.config import VllmEngineConfig
from rollmesh.services.inference.engines.vllm.host import VllmHost
from rollmesh.services.inference.engines.vllm.load import LoadCounts
from rollmesh.services.inference.engines.vllm.request import OUTPUTS, LiveRequest
from rollmesh.services.inference.engines.vllm.scores import SCORE_OUTPUTS, num_score_pairs, score_result
from rollmesh.services.inference.engines.vllm.swap_gate import SwapGate
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import FinishReason, IntArray, SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.model_folder import check_positions

if TYPE_CHECKING:
    from rollmesh.services.inference.engines.vllm.model import ModelFolder

RESTARTS_MAX = 3
"""Updates at which a request without a token begins again. Without a limit, a prompt that takes longer than the time
between two updates would never end."""
_WATCH_S = 1.0


class VllmEngine(Engine):
    """The engine of an embedded vLLM."""

    Options: ClassVar[type[Settings]] = VllmEngineConfig
    capabilities: EngineCapabilities

    def __init__(self, options: VllmEngineConfig) -> None:
        self._config = options
        self.capabilities = EngineCapabilities(outputs=OUTPUTS, score_outputs=SCORE_OUTPUTS, dtype=options.dtype)
        self._context_max = options.context_max
        """0 until the start, if the model gives it."""
        self._host = VllmHost(options)
        self._counts = LoadCounts(slots_max=options.slots_max)
        self._gate = SwapGate()
        self._live: dict[str, LiveRequest] = {}
        self._queue: list[tuple[int, int, LiveRequest]] = []
        self._numbers = itertools.count(1)
        self._serials = itertools.count(1)
        self._serial = 0
        self._running: dict[str, asyncio.Task[None]] = {}
        self._collectors: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead = asyncio.Event()
        self._active: PolicyVersion | None = None
        self._opened: ModelFolder | None = None
        """The files of the model and of prepared versions; None until the start."""
        self._broken = "engine is not started"

    @classmethod
    def check_model(cls, options: VllmEngineConfig) -> None:
        """Raise ConfigError for a context that the model does not have. Whether vLLM can run the model shows at the
        start."""
        from rollmesh.services.inference.engines.torch.model_spec import read_config

        try:
            config = read_config(Path(options.model))
        except ValueError as err:
            raise ConfigError(str(err), key="model") from err
        check_positions(
            config.get_text_config().to_dict(),
            options.context_max,
            model=options.model,
            key="inference.engine.options.context_max",
        )

    @property
    def active(self) -> PolicyVersion | None:
        return self._active

    @property
    def held(self) -> tuple[PolicyVersion, ...]:
        return () if self._active is None else (self._active,)

    @property
    def context_max(self) -> int:
        return self._context_max

    @property
    def _files(self) -> ModelFolder:
        assert self._opened is not None, self._broken
        return self._opened

    # Start and end ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        from rollmesh.services.inference.engines.vllm.host import require_vllm

        require_vllm()
        from rollmesh.services.inference.engines.vllm.model import ModelFolder

        files = await asyncio.to_thread(ModelFolder, self._config)
        self._context_max = files.context_max
        self._llm = await self._host.start(files.context_max, self._counts.stat_logger)
        self._opened = files
        self._stop_rules = StopRules(files.vocab_size, files.decode)
        self._broken = ""
        try:
            await self._llm.collective_rpc("rollmesh_install")
            await self.repair_tied(self._config.tied_repair)
            tasks = await self._llm.get_supported_tasks()
        except Exception as err:  # vLLM raises whatever its worker raised
            raise ConfigError(f"vLLM has started, but cannot be used: {err}", key="inference.engine") from err
        if "generate" not in tasks:
            raise ConfigError(
                f"`model`: vLLM cannot generate with {self._config.model}: `architectures` in its config.json must "
                "name a causal language model",
                key="model",
            )
        await self._try_generation()
        self._counts.set_cache(self._llm.vllm_config.cache_config)
        self._spawn(self._watch())

    async def _try_generation(self) -> None:
        """Generate one token. vLLM starts with some models that its attention cannot run, and ends at their first
        request."""
        params = SamplingParams(max_tokens=1)
        request = GenerateRequest(request_id="start", token_ids=np.zeros(1, np.int32), params=params)
        live = LiveRequest(request, lambda _: None, self._stop_rules, self._config.flush_tokens)
        try:
            async for _ in self._llm.generate(self._prompt(request.token_ids), self._params(live), "start"):
                pass
        except Exception as err:  # vLLM raises whatever its processes raised
            raise ConfigError(
                f"`model`: vLLM has started, but cannot generate a token with {self._config.model}: "
                f"{type(err).__name__}: {err}; the log of this process has the error of vLLM's worker; choose a model, "
                "a device or `inference.engine.options.arguments` that vLLM runs",
                key="model",
            ) from err

    async def close(self) -> None:
        self._broken = self._broken or "engine is closed"
        self._end_all(FinishReason.CANCELLED)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._host.stop()
        if self._opened is not None:
            self._opened.close()

    async def failed(self) -> None:
        """Raise EngineBroken when vLLM's processes have ended. The node then exits, because a new process can start
        them again."""
        await self._dead.wait()
        raise EngineBroken(self._broken)

    async def _watch(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 (other processes end)
            await asyncio.sleep(_WATCH_S)
        self._break("a process of vLLM ended; the log of this process has its last messages")
        self._dead.set()

    def _break(self, cause: str) -> None:
        """Record why the engine cannot run any more, and end every request."""
        self._broken = self._broken or cause
        self._end_all(FinishReason.ERROR)

    def _end_all(self, reason: FinishReason) -> None:
        for request in list(self._live.values()):
            self._receive(request)
            self._end(request, reason, self._broken if reason is FinishReason.ERROR else "")

    def _check_alive(self) -> None:
        if self._broken:
            raise EngineBroken(self._broken)

    async def repair_tied(self, enabled: bool) -> None:
        """Turn the repair of tied output layers on or off, from the next update on."""
        await self._llm.init_weight_transfer_engine(_message("Init", init_info={"tied_repair": enabled}))

    # Requests ---------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        self._check_alive()
        check_request(request, self, vocab_size=self._files.vocab_size, is_live=self._live.__contains__)
        self._stop_rules.check(request.params, where=f"request {request.request_id!r}")
        if len(self._live) >= self._config.slots_max + self._config.queue_max:
            raise EngineBusy(f"{self._config.queue_max} requests are waiting already")
        live = LiveRequest(request, emit, self._stop_rules, self._config.flush_tokens)
        live.submitted_s = time.perf_counter()
        self._live[request.request_id] = live
        heapq.heappush(self._queue, (-request.priority, next(self._numbers), live))
        self._admit()

    def cancel(self, request_id: str) -> None:
        request = self._live.get(request_id)
        if request is not None:
            # Called later, so that `emit` does not run inside the caller's call.
            asyncio.get_running_loop().call_soon(self._cancel, request)

    def _cancel(self, request: LiveRequest) -> None:
        finish = self._receive(request)
        self._end(request, finish or FinishReason.CANCELLED)

    def _admit(self) -> None:
        """Start waiting requests while there are slots."""
        if self._active is None or self._gate.swapping or self._broken:
            return
        while self._queue and len(self._running) < self._config.slots_max:
            *_, request = heapq.heappop(self._queue)
            request.queued_s = time.perf_counter() - request.submitted_s
            request.meets(self._serial, self._active, KvPolicy.RECOMPUTE)
            request_id = request.request.request_id
            self._running[request_id] = self._spawn(self._run(request))

    async def _run(self, request: LiveRequest) -> None:
        """Run one request in vLLM until it ends."""
        request_id = request.request.request_id
        try:
            collector = await self._llm.add_request(
                f"{request_id}#{next(self._numbers)}",
                self._prompt(request.request.token_ids),
                self._params(request),
            )
            # It may have ended or begun again before vLLM had it.
            if self._running.get(request_id) is not asyncio.current_task():
                await self._llm.abort(collector.request_id, internal=True)
                return
            self._collectors[request_id] = collector
            finish = None
            while finish is None and not request.ended:
                output = collector.get_nowait() or await collector.get()
                finish = self._take(request, output)
            if finish is not None:
                self._end(request, finish)
        except asyncio.CancelledError:
            raise
        except Exception as err:  # noqa: BLE001 - vLLM raises for a dead process; this is the one recording point
            self._break(f"vLLM failed: {type(err).__name__}: {err}")

    def _receive(self, request: LiveRequest) -> FinishReason | None:
        """Take what has arrived for a request. Return the reason if it ends with it."""
        collector = self._collectors.get(request.request.request_id)
        if collector is None or request.ended or isinstance(collector.output, Exception):
            return None
        output = collector.get_nowait()
        return None if output is None else self._take(request, output)

    def _take(self, request: LiveRequest, output: Any) -> FinishReason | None:
        finish, num_new = request.take(output)
        self._counts.generated(num_new)
        return finish

    def _end(self, request: LiveRequest, reason: FinishReason, error: str = "") -> None:
        """Emit the end of a request, and free its slot."""
        if request.ended:
            return
        request_id = request.request.request_id
        request.finish(reason, self._active, error)
        self._counts.ended(request)
        del self._live[request_id]
        if request_id not in self._running:
            self._queue = [entry for entry in self._queue if entry[2] is not request]
            heapq.heapify(self._queue)
        task = self._running.pop(request_id, None)
        collector = self._collectors.pop(request_id, None)
        if collector is not None and request.must_abort:
            self._abort(collector.request_id)
        if task is not None and task is not asyncio.current_task() and collector is not None:
            task.cancel()
        self._admit()

    def _abort(self, internal_id: str) -> None:
        if self._broken:
            return
        self._spawn(self._llm.abort(internal_id, internal=True))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _prompt(self, token_ids: IntArray) -> Any:
        from vllm.inputs.engine import tokens_input

        return tokens_input(token_ids.tolist(), cache_salt=str(self._serial))

    def _params(self, request: LiveRequest) -> Any:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        params, length = request.request.params, len(request.request.token_ids)
        seed = int(np.uint64(params.seed).astype(np.int64))
        return vllm.SamplingParams(
            max_tokens=min(params.max_tokens, self.context_max - length),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=request.num_pairs,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={columns.ARGUMENT: [seed, params.temperature, params.top_p, params.top_k]},
        )

    # Scores -----------------------------------------------------------------------------------------------------------

    async def score(
        self,
        sequences: Sequence[IntArray],
        *,
        version: PolicyVersion | None = None,
        outputs: tuple[str, ...] = (),
        num_top: int = NUM_TOP,
    ) -> list[ScoreResult]:
        self._check_alive()
        check_score(
            sequences, self, vocab_size=self._files.vocab_size, version=version, outputs=outputs, num_top=num_top
        )
        slots = asyncio.Semaphore(self._config.score_slots)
        async with self._gate.score():
            self._check_alive()
            active = self._active
            assert active is not None, "checked"
            if version is not None and version != active:
                raise ValueError(f"{version} is not held, held are [{active}]")
            rows = await asyncio.gather(
                *(self._score_one(sequence, slots, num_score_pairs(outputs, num_top)) for sequence in sequences)
            )
            return [score_result(row, active, self._serial, outputs) for row in rows]

    async def _score_one(self, sequence: IntArray, slots: asyncio.Semaphore, num_pairs: int) -> Any:
        """Return ids and values [n - 1, 1 + num_pairs] of the tokens after the first one."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        if len(sequence) == 1:
            return np.empty((0, 1 + num_pairs), np.int64), np.empty((0, 1 + num_pairs))
        params = vllm.SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=num_pairs,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with slots, self._calls():
            name = f"score#{next(self._numbers)}"
            async for output in self._llm.generate(self._prompt(sequence), params, name):
                pairs = output.prompt_logprobs
        shape = (len(sequence) - 1, 1 + num_pairs)
        return np.array(pairs.token_ids, np.int64).reshape(shape), np.array(pairs.logprobs).reshape(shape)

    @asynccontextmanager
    async def _calls(self) -> AsyncIterator[None]:
        """Turn an error of vLLM into EngineBroken."""
        try:
            yield
        except Exception as err:  # vLLM raises whatever its processes raised
            self._break(f"vLLM failed: {type(err).__name__}: {err}")
            raise EngineBroken(self._broken) from err

    # Weights ----------------------------------------------------------------------------------------------------------

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        self._check_alive()
        if version != self._active:
            await self._files.prepare(version, tensors)

    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> None:
        self._check_alive()
        async with self._gate.swap():
            self._check_alive()
            if version == self._active:
                return
            check_retain(retain, self, version)
            folder = self._files.take(version)
            try:
                await self._swap(version, kv, folder)
            except BaseException as err:
                self._break(f"the update to {version} failed, and the weights are unknown: {type(err).__name__}: {err}")
                if isinstance(err, asyncio.CancelledError):
                    raise
                raise EngineBroken(self._broken) from err
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._admit()

    async def _swap(self, version: PolicyVersion, kv: KvPolicy, folder: Path) -> None:
        """Swap the weights while vLLM is paused. The worker stamps every token, so a late output keeps its version."""
        serial = next(self._serials)
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._llm.start_weight_update()
        update = {"files": self._files.paths(folder), "serial": serial}
        await self._llm.update_weights(_message("Update", update_info=update))
        await self._llm.finish_weight_update(weight_version=str(version))
        if kv is KvPolicy.RECOMPUTE and not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop its key-value cache")
        for request in list(self._live.values()):
            finish = self._receive(request)
            request.flush()
            if finish is None and request.request.version not in (None, version):
                finish = FinishReason.CANCELLED
            if finish is not None:
                self._end(request, finish)
            elif request.request.request_id in self._running:
                begins = not request.has_tokens and request.num_restarts < RESTARTS_MAX
                request.meets(serial, version, KvPolicy.RECOMPUTE if begins else kv)
                if begins:
                    self._begin_again(request)
        self._serial, self._active = serial, version
        await self._llm.resume_generation()

    def _begin_again(self, request: LiveRequest) -> None:
        """Let a request without tokens begin under the weights that become active, in a new task. The old one aborts a
        request that it is still adding to vLLM."""
        request_id = request.request.request_id
        request.num_restarts += 1
        if (collector := self._collectors.pop(request_id, None)) is not None:
            self._running[request_id].cancel()
            self._abort(collector.request_id)
        self._running[request_id] = self._spawn(self._run(request))

    def discard(self, version: PolicyVersion) -> None:
        if self._opened is not None:
            self._opened.discard(version)

    def load(self) -> EngineLoad:
        return self._counts.load(num_running=len(self._running), num_waiting=len(self._live) - len(self._running))


def _message(kind: str, **fields: Any) -> Any:
    from vllm.distributed.weight_transfer import base

    return getattr(base, f"WeightTransfer{kind}Request")(**fields)
