"""An engine whose model runs in a server that the user started. `server` names what differs between servers.

The engine queues requests, keeps at most `slots_max` of them at the server, finds stop strings, and stamps versions. An
update of the weights ends all parts at the server, loads the weights, and sends the rest of each request again with the
tokens that it has:

    submit -> queue -> part under version v -> abort, last tokens of v -> [update to w] -> part under w, whose prefix
    has the tokens of v

So every token has exactly one version and its keys and values are of that version, under both policies of the cache.
The server names its weights in each last message; a part that other weights sampled ends with ERROR. Beside that, a
poll compares the name, so that a server that was restarted or that another client updates is detected.

A request whose connection fails ends with ERROR, and the router repeats it elsewhere. A server without a response for
`dead_s` breaks the engine until the node restarts.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.inference.engine import (
    NO_VERSION,
    Emit,
    Engine,
    EngineBroken,
    EngineBusy,
    EngineLoad,
    GenerateDelta,
    GenerateRequest,
    KvPolicy,
    ScoreResult,
)
from rollmesh.services.inference.engines.attached.config import AttachedConfig
from rollmesh.services.inference.engines.attached.server import (
    ABORTED,
    STOPPED,
    AttachedServer,
    ServerChunk,
    ServerPart,
    ServerStatus,
)
from rollmesh.services.inference.engines.attached.weight_folders import WeightFolders, version_label
from rollmesh.services.inference.engines.common.requests import check_request, check_retain, check_score
from rollmesh.services.inference.engines.common.stop import StopRules, load_decode
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.domain.engine_capabilities import EngineCapabilities
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import FinishReason, IntArray
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError, DeadlineExceeded, Internal, MeshError, Unauthenticated, Unavailable
from rollmesh.shared.net.retry import retry
from rollmesh.shared.weights.model_folder import check_positions

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SCORES_MAX = 8
"""Most sequences that are scored at the server at once."""


@dataclass(frozen=True)
class _ConnectLimits:
    backoff_s: float = 0.2
    backoff_s_max: float = 2.0


@dataclass(slots=True, eq=False)
class _AttachedRequest:
    request: GenerateRequest
    emit: Emit
    order: tuple[int, int]
    end: int
    """Length of the sequence, prefix included, at which it ends with LENGTH."""
    marks: NDArray[np.uint8]
    """Stop flags of the vocabulary."""
    submitted_s: float
    new: list[int] = field(default_factory=list)
    part: ServerPart | None = None
    """The part at the server; None while the request waits."""
    task: asyncio.Task[None] | None = None
    received: bool = False
    """The server has sent tokens of this part, so it knows the part's id."""
    parked: bool = False
    """The part is being ended for an update."""
    cancelled: bool = False
    started: bool = False
    """The first delta was emitted."""
    queued_s: float = 0.0

    @property
    def prefix(self) -> IntArray:
        return np.concatenate((self.request.token_ids, np.array(self.new, np.int32))).astype(np.int32)


class AttachedEngine(Engine):
    """Implements `rollmesh.services.inference.engine.Engine` on an `AttachedServer`. A subclass constructs the
    server."""

    def __init__(self, options: AttachedConfig, server: AttachedServer, clock: Clock | None = None) -> None:
        self._config = options
        self._server = server
        self._clock = clock or SystemClock()
        self._folders = WeightFolders(Path(options.weights_dir), options.weights_dir_at_server, Path(options.model))
        self._writer = ThreadPoolExecutor(1, "weight-folders")
        self._live: dict[str, _AttachedRequest] = {}
        self._waiting: list[tuple[tuple[int, int], _AttachedRequest]] = []
        self._arrivals = itertools.count()
        self._num_at_server = 0
        self._prepared: OrderedDict[PolicyVersion, None] = OrderedDict()
        self._active: PolicyVersion | None = None
        self._updating = asyncio.Lock()
        self._epoch = 0
        """Number of the updates begun."""
        self._status = ServerStatus(label="")
        self._broken = "engine is not started"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._num_generated = self._num_prefilled = self._num_hit = self._num_chunks = 0

    @classmethod
    def check_model(cls, options: AttachedConfig) -> None:
        """Raise ConfigError for a folder without a readable configuration, and for a context beyond the model's
        positions."""
        check_positions(_read_model(options), options.context_max, model=options.model, key="context_max")

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._server.capabilities

    @property
    def active(self) -> PolicyVersion | None:
        return self._active

    @property
    def held(self) -> tuple[PolicyVersion, ...]:
        return () if self._active is None else (self._active,)

    @property
    def context_max(self) -> int:
        return self._config.context_max

    # Lifecycle --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and compare the server with the model folder. Raises ConfigError, and Unavailable if it is not
        reachable."""
        config = self._config
        self.check_model(config)
        model = _read_model(config)
        self._vocab_size = _vocab_size(model, config.model)
        self._stop_rules = StopRules(self._vocab_size, load_decode(Path(config.model)))
        try:
            await asyncio.to_thread(self._folders.open)
        except OSError as err:
            raise ConfigError(f"`weights_dir`: cannot use {config.weights_dir}: {err}", key="weights_dir") from err
        await self._server.open()
        try:
            await self._patiently(lambda: self._server.check(model, self._vocab_size), config.connect_s)
        except (Unavailable, DeadlineExceeded) as err:
            raise Unavailable(
                f"no server at `url` {config.url} within connect_s = {config.connect_s:g}: {err}; start it, or correct "
                "the address"
            ) from err
        except Unauthenticated as err:
            raise ConfigError(f"`api_key_file`: the server rejects the key: {err}", key="api_key_file") from err
        self._broken = ""
        self._spawn(self._watch())

    async def close(self) -> None:
        parts = [live.part.part_id for live in self._live.values() if live.part is not None]
        for live in list(self._live.values()):
            self._end(live, FinishReason.CANCELLED)
        self._broken = self._broken or "engine is closed"
        self._cancel_tasks()
        if parts:
            await self._abort(parts)
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.close()
        self._writer.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._folders.close)

    # Requests ---------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        self._check_alive()
        check_request(request, self, vocab_size=self._vocab_size, is_live=self._live.__contains__)
        self._stop_rules.check(request.params, where=f"request {request.request_id!r}")
        self._server.check_request(request)
        if len(self._live) >= self._config.slots_max + self._config.queue_max:
            raise EngineBusy(f"{self._config.queue_max} requests are waiting already")
        live = _AttachedRequest(
            request,
            emit,
            order=(-request.priority, next(self._arrivals)),
            end=min(len(request.token_ids) + request.params.max_tokens, self.context_max),
            marks=self._stop_rules.marks(request.params),
            submitted_s=self._clock.monotonic_s(),
        )
        self._live[request.request_id] = live
        self._queue(live)
        # Later, so that `emit` never runs inside the caller's call.
        asyncio.get_running_loop().call_soon(self._pump)

    def cancel(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is None or live.cancelled:
            return
        live.cancelled = True
        if live.task is None:
            asyncio.get_running_loop().call_soon(self._end, live, FinishReason.CANCELLED)
        else:
            self._spawn(self._end_part(live))

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._num_at_server,
            num_waiting=len(self._live) - self._num_at_server,
            slots_max=self._config.slots_max,
            kv_tokens_used=self._status.kv_tokens_used,
            kv_tokens_max=self._status.kv_tokens_max,
            tokens_generated=self._num_generated,
            tokens_prefilled=self._num_prefilled,
            tokens_prefix_hit=self._num_hit,
            steps=self._num_chunks,
        )

    def _queue(self, live: _AttachedRequest) -> None:
        live.part, live.task, live.received, live.parked = None, None, False, False
        if len(self._waiting) > 2 * len(self._live):  # drop the entries of requests that have ended
            self._waiting = [entry for entry in self._waiting if self._is_live(entry[1])]
            heapq.heapify(self._waiting)
        heapq.heappush(self._waiting, (live.order, live))

    def _is_live(self, live: _AttachedRequest) -> bool:
        return self._live.get(live.request.request_id) is live

    def _pump(self) -> None:
        """Send waiting requests to the server."""
        while (
            self._waiting
            and self._active is not None
            and not self._updating.locked()
            and not self._broken
            and self._num_at_server < self._config.slots_max
        ):
            live = heapq.heappop(self._waiting)[1]
            if self._is_live(live) and not live.cancelled:
                self._begin_part(live, self._active)

    def _begin_part(self, live: _AttachedRequest, version: PolicyVersion) -> None:
        if not live.started:
            live.queued_s = self._clock.monotonic_s() - live.submitted_s
        prefix = live.prefix
        live.part = ServerPart(
            part_id=uuid.uuid4().hex,  # of one length: SGLang aborts every id that begins with the given one
            token_ids=prefix,
            params=live.request.params,
            max_tokens=live.end - len(prefix),
            outputs=live.request.outputs,
            num_top=live.request.num_top,
            label=version_label(version),
        )
        self._num_at_server += 1
        live.task = self._spawn(self._run_part(live, live.part, version))

    async def _run_part(self, live: _AttachedRequest, part: ServerPart, version: PolicyVersion) -> None:
        """Receive one part, then end the request or queue the rest of it."""
        cause = "the server closed the stream before the end of the request"
        ended = False
        try:
            async with aclosing(self._server.stream(part)) as chunks:
                async for chunk in chunks:
                    live.received = True
                    ended = self._receive(live, part, version, chunk)
                    if ended or chunk.finish or not self._is_live(live):
                        break
        except asyncio.CancelledError:
            pass  # only `_end_part` and `_break` cancel it, and the state says why
        except MeshError as err:
            cause, live.parked = str(err), False
        except Exception as err:  # noqa: BLE001 - the one recording point of a malformed message: the cause goes to the request
            cause, live.parked = f"the server's message is not usable: {type(err).__name__}: {err}", False
        finally:
            self._num_at_server -= 1
            live.task = None
        if ended and not chunk.finish:
            await self._abort([part.part_id])  # a stop string: the server does not know that the request has ended
        if self._is_live(live):
            if live.cancelled:
                self._end(live, FinishReason.CANCELLED)
            elif live.parked:
                self._queue(live)
            else:
                self._end(live, FinishReason.ERROR, cause)
        self._pump()

    def _receive(self, live: _AttachedRequest, part: ServerPart, version: PolicyVersion, chunk: ServerChunk) -> bool:
        """Emit the tokens of a chunk. Return whether the request has ended. Raises Internal for a chunk that must not
        be used."""
        if other := set(chunk.labels) - {part.label}:
            raise Internal(
                f"the server sampled with weights {sorted(other)}, not {part.label!r}: another client updates it"
            )
        params, prompt = live.request.params, live.request.token_ids
        resumed = prompt[len(prompt) - live.request.num_resumed :].tolist()
        stop = self._stop_rules.first_stop(params, live.marks, [*resumed, *live.new], chunk.tokens)
        num = len(chunk.tokens) if stop is None else stop
        live.new += chunk.tokens[:num].tolist()
        full = len(prompt) + len(live.new) >= live.end
        finish = FinishReason.STOP if stop is not None else FinishReason.LENGTH if full else None
        problem = ""
        if finish is None and chunk.finish == ABORTED and live.cancelled:
            finish = FinishReason.CANCELLED
        elif finish is None and chunk.finish:
            # At the model's own end token, which the request does not name, the rest follows as a new part.
            live.parked = live.parked or (chunk.finish == STOPPED and len(live.new) > len(part.token_ids) - len(prompt))
            if not (live.parked and chunk.finish in (ABORTED, STOPPED)):
                problem = f"the server ended the request after {len(live.new)} tokens: {chunk.finish} {chunk.message}"
        self._count(live, part, chunk, num)
        if num or finish is not None:
            self._emit(live, version, chunk, num, finish)
        if problem:
            raise Internal(problem.rstrip())
        return finish is not None

    def _count(self, live: _AttachedRequest, part: ServerPart, chunk: ServerChunk, num: int) -> None:
        self._num_chunks += 1
        self._num_generated += num
        first = len(part.token_ids) + num == len(live.request.token_ids) + len(live.new)
        if first and chunk.num_cached is not None:
            self._num_hit += chunk.num_cached
            self._num_prefilled += len(part.token_ids) - chunk.num_cached

    def _emit(
        self, live: _AttachedRequest, version: PolicyVersion, chunk: ServerChunk, num: int, finish: FinishReason | None
    ) -> None:
        if finish is not None:
            del self._live[live.request.request_id]
        first, live.started = not live.started, True
        cached = chunk.num_cached if first else None
        live.emit(
            GenerateDelta(
                request_id=live.request.request_id,
                token_ids=chunk.tokens[:num],
                logprobs=chunk.logprobs[:num],
                logprobs_model=None if chunk.logprobs_model is None else chunk.logprobs_model[:num],
                arrays={name: values[:num] for name, values in chunk.arrays.items()} if num else {},
                version=version,
                kv_step_oldest=version.step,
                finish=finish,
                num_prompt_cached=cached or 0,
                num_prompt_prefilled=0 if cached is None else len(live.request.token_ids) - cached,
                queued_s=live.queued_s if first else 0.0,
            )
        )

    def _end(self, live: _AttachedRequest, finish: FinishReason, error: str = "") -> None:
        """Emit a last delta without tokens, unless the request has ended."""
        if self._live.pop(live.request.request_id, None) is None:
            return
        version, empty = self._active or NO_VERSION, np.empty(0, np.float32)
        live.emit(
            GenerateDelta(
                request_id=live.request.request_id,
                token_ids=np.empty(0, np.int32),
                logprobs=empty,
                logprobs_model=empty,
                version=version,
                kv_step_oldest=version.step,
                finish=finish,
                error=error,
            )
        )

    async def _end_part(self, live: _AttachedRequest) -> None:
        """End the current part at the server and wait for its last tokens, at most `call_s`; then drop the
        connection."""
        task, part = live.task, live.part
        if task is None or part is None:
            return
        if live.received:
            await self._abort([part.part_id])
            await asyncio.wait([task], timeout=self._config.call_s)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            await self._abort([part.part_id])

    async def _abort(self, part_ids: Sequence[str]) -> None:
        try:
            await self._server.abort(part_ids)
        except MeshError as err:
            _log.warning("abort failed: url=%s parts=%d cause=%s", self._config.url, len(part_ids), err)

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
        check_score(sequences, self, vocab_size=self._vocab_size, version=version, outputs=outputs, num_top=num_top)
        return await self._call(self._score(sequences, version, num_top if outputs else 0))

    async def _score(
        self, sequences: Sequence[IntArray], wanted: PolicyVersion | None, num_top: int
    ) -> list[ScoreResult]:
        while True:
            async with self._updating:
                epoch, version = self._epoch, self._active
            assert version is not None, "a version was active before"
            if wanted is not None and wanted != version:
                raise ValueError(f"{wanted} is not held, held is {version}")
            results = await self._score_under(sequences, version, num_top)
            if epoch == self._epoch:
                return results

    async def _score_under(
        self, sequences: Sequence[IntArray], version: PolicyVersion, num_top: int
    ) -> list[ScoreResult]:
        limit = asyncio.Semaphore(_SCORES_MAX)

        async def one(token_ids: IntArray) -> ScoreResult:
            async with limit:
                scored = await self._patiently(
                    lambda: self._server.score(token_ids, num_top=num_top), self._config.call_s
                )
            # Of weights that another client has loaded, nothing is known but that they are not this version.
            right = not set(scored.labels) - {version_label(version)}
            return ScoreResult(logprobs=scored.logprobs, version=version if right else NO_VERSION, arrays=scored.arrays)

        tasks = [asyncio.create_task(one(token_ids)) for token_ids in sequences]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    # Weights ----------------------------------------------------------------------------------------------------------

    async def prepare(self, version: PolicyVersion, tensors: Mapping[str, Path]) -> None:
        self._check_alive()
        if version == self._active or version in self._prepared:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._folders.write, version, dict(tensors))
        except BaseException as err:
            self._remove_folder(version)  # after the write, which continues if the caller is cancelled
            if isinstance(err, OSError):
                what = f"cannot write the weights to `weights_dir` {self._config.weights_dir}: {err}"
                raise EngineBroken(what) from err
            raise
        self._prepared[version] = None
        while len(self._prepared) > self._config.prepared_max:
            self.discard(next(iter(self._prepared)))

    async def activate(self, version: PolicyVersion, kv: KvPolicy, retain: Collection[PolicyVersion] = ()) -> None:
        self._check_alive()
        check_retain(retain, self, version)
        if version == self._active:
            return
        del self._prepared[version]
        await self._call(self._update(version))

    async def _update(self, version: PolicyVersion) -> None:
        async with self._updating:
            self._epoch += 1
            cause = "it was interrupted"
            try:
                await self._park_all(version)
                async with asyncio.timeout(self._config.update_s):
                    await self._server.update(self._folders.path_at_server(version), version_label(version))
                cause = ""
            except TimeoutError as err:
                cause = f"no response within update_s = {self._config.update_s:g}"
                raise Unavailable(cause) from err
            except MeshError as err:
                cause = str(err)
                raise
            finally:
                if cause:
                    self._break(f"the update of the server to {version} failed: {cause}; restart server and node")
            old, self._active = self._active, version
        if old is not None:
            self._remove_folder(old)
        self._pump()

    async def _park_all(self, version: PolicyVersion) -> None:
        """End all parts, and cancel the requests that are pinned to other weights."""
        for live in list(self._live.values()):
            if live.request.version is not None and live.request.version != version:
                self.cancel(live.request.request_id)
            live.parked = live.task is not None
        running = [live for live in self._live.values() if live.task is not None]
        await asyncio.gather(*(self._end_part(live) for live in running))

    def discard(self, version: PolicyVersion) -> None:
        if version in self._prepared:
            del self._prepared[version]
            self._remove_folder(version)

    def _remove_folder(self, version: PolicyVersion) -> None:
        if not self._broken:
            self._writer.submit(self._folders.remove, version)

    # Failure ----------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Poll the server's state until the engine breaks. Polls beside an update say nothing."""
        answered_s = self._clock.monotonic_s()
        while not self._broken:
            await self._clock.sleep(self._config.poll_s)
            updating, epoch, status, cause = self._updating.locked(), self._epoch, None, ""
            try:
                status = await self._server.status()
            except MeshError as err:
                cause = str(err)
            updating = updating or self._updating.locked() or epoch != self._epoch
            if status is not None or updating:
                answered_s = self._clock.monotonic_s()
            if self._clock.monotonic_s() - answered_s >= self._config.dead_s:
                self._break(
                    f"no response from the server for dead_s = {self._config.dead_s:g}: {cause}; restart the node"
                )
            if status is None:
                continue
            self._status = status
            if not updating and self._active is not None and status.label != version_label(self._active):
                self._break(
                    f"the server now has weights {status.label!r}, not {version_label(self._active)!r}: it was "
                    "restarted, or another client updates it; restart the node"
                )

    def _break(self, cause: str) -> None:
        """End every request with ERROR, every call with EngineBroken, and every task. The first cause stays."""
        if self._broken:
            return
        self._broken = cause
        _log.warning("engine broken: url=%s cause=%s", self._config.url, cause)
        for live in list(self._live.values()):
            self._end(live, FinishReason.ERROR, cause)
        self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        for task in (self._tasks | self._calls) - {asyncio.current_task()}:
            task.cancel()

    def _check_alive(self) -> None:
        if self._broken:
            raise EngineBroken(self._broken)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call to the server. Raises EngineBroken if it fails, or if the engine breaks meanwhile."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not self._broken or (this is not None and this.cancelling()):
                raise
            raise EngineBroken(self._broken) from None
        except MeshError as err:
            raise EngineBroken(self._broken or str(err)) from err
        finally:
            self._calls.discard(task)

    async def _patiently(self, work: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """Repeat a call without side effects while the server is not reachable, at most for `limit_s`."""
        return await retry(work, limit_s=limit_s, config=_ConnectLimits(), clock=self._clock)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _read_model(options: AttachedConfig) -> dict[str, Any]:
    path = Path(options.model) / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"`model`: cannot read {path}: {err}; name the folder of the server's model", key="model"
        ) from err
    if not isinstance(fields, dict):
        raise ConfigError(f"`model`: {path} must contain a JSON object", key="model")
    return fields


def _vocab_size(model: Mapping[str, Any], folder: str) -> int:
    size = model.get("vocab_size") or (model.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"`model`: the config.json in {folder} must give `vocab_size`, got {size!r}", key="model")
    return size
