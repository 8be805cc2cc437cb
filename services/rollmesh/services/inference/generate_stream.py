"""The live requests of one client stream, and the deltas that wait to be sent.

Tokens of an unfinished request are collected for `hold_s` of its submission, and enter the outbox as one delta with the
next ones, after that time, or with the last one. All deltas in the outbox leave in one frame. The outbox has a limit in
tokens. If the client does not read, its stream fails, so that the node's memory stays bounded. Tokens of unverified
weights stay in the outbox (see `gate`).

A request ends exactly once, with the engine's last delta or with an error that replaces it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import EngineBroken, EngineBusy, GenerateDelta, GenerateRequest
from rollmesh.services.inference.metrics import QUEUE_SECONDS
from rollmesh.services.inference.request_trace import RequestTrace
from rollmesh.services.inference.state import ServingState
from rollmesh.shared.codec.arrays import decode_ints
from rollmesh.shared.codec.failure import encode_failure
from rollmesh.shared.codec.trajectory import decode_sampling_params, encode_segment
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import FinishReason, oldest_kv_step
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import EngineFailed, InvalidInput, MeshError, Overloaded, StaleWeights, field_error
from rollmesh.shared.telemetry import tracing
from rollmesh.shared.telemetry.metrics import observe
from rollmesh.v1 import inference_pb2, types_pb2

HOLD_S_MAX = 1.0
"""Longest `hold_s` of a submission, in seconds."""
_LOAD_S = 0.05
"""Minimum time between two reports of the load on a stream, in seconds."""
_stream_numbers = itertools.count()


@dataclass(slots=True)
class _Live:
    request_id: str
    engine_id: str
    version: PolicyVersion | None
    """The only version that may sample the request. Set for EXACT and the pinned selectors."""
    hold_s: float = 0.0
    """Longest time for which tokens are collected."""
    trace: RequestTrace | None = None
    """Set if the request is traced."""
    collected: list[GenerateDelta] = field(default_factory=list)
    """Deltas of one version that are not in the outbox yet."""
    ended_by: MeshError | None = None
    """Error for which the node cancelled the request. It replaces the engine's CANCELLED."""


@dataclass(slots=True)
class _Waiting:
    delta: inference_pb2.GenerateDelta
    version: PolicyVersion | None
    """The weights that sampled it. None for a rejection, which is never held back."""
    num_tokens: int


class GenerateStream:
    """Requests of one Generate stream, or of one GenerateOne."""

    def __init__(self, state: ServingState, config: InferenceConfig) -> None:
        self._state = state
        self._config = config
        self._prefix = f"s{next(_stream_numbers)}/"
        self._live: dict[str, _Live] = {}
        self._outbox: deque[_Waiting] = deque()
        self._outbox_tokens = 0
        self._wake = asyncio.Event()
        self._collecting: list[tuple[float, _Live]] = []
        """Requests with collected tokens and the time at which these enter the outbox."""
        self._timer: asyncio.TimerHandle | None = None
        self._input_ended = False
        self._failure: BaseException | None = None
        self._load_due_s = 0.0
        state.gate.listen(self._on_verdict)
        state.listen_swap(self._on_swap)

    # Input of the client ----------------------------------------------------------------------------------------------

    def submit(self, submission: inference_pb2.Submission) -> None:
        """Submit a request to the engine. A rejection goes to the outbox."""
        try:
            self._submit(submission)
        except MeshError as err:
            self._reject(submission.request_id, err)

    def cancel(self, request_id: str) -> None:
        """End a request. Its last delta has the tokens that were not sent yet. Unknown ids are ignored."""
        if live := self._live.get(request_id):
            self._state.engine.cancel(live.engine_id)

    def end_input(self, failure: BaseException | None = None) -> None:
        """Note that the client sends nothing more. If `failure` is given, the stream ends with it."""
        self._input_ended = True
        self._failure = self._failure or failure
        self._wake.set()

    # Output to the client ---------------------------------------------------------------------------------------------

    async def frame(self) -> list[inference_pb2.GenerateDelta]:
        """Wait for new deltas and return them; return an empty list at the end. Raises the error that ended the
        stream."""
        while True:
            if self._failure is not None:
                raise self._failure
            if deltas := list(self._take()):
                return deltas
            if self._input_ended and not self._live and not self._outbox:
                return []
            self._wake.clear()
            await self._wake.wait()

    def load(self) -> inference_pb2.NodeLoad | None:
        """Return the load of the node if a report is due."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._load_due_s:
            return None
        self._load_due_s = now_s + _LOAD_S
        load = self._state.engine.load()
        return inference_pb2.NodeLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_pressure=load.kv_pressure,
            kv_tokens_max=load.kv_tokens_max,
        )

    def end_all(self, err: MeshError) -> None:
        """End every live request with `err`, after the tokens that it has."""
        for live in list(self._live.values()):
            self._end(live, err)

    def close(self) -> None:
        """Cancel every request at the engine and drop the outbox."""
        self._state.gate.unlisten(self._on_verdict)
        self._state.unlisten_swap(self._on_swap)
        for live in list(self._live.values()):
            self._forget(live)
            if live.trace is not None:
                live.trace.end("CANCELLED")
            self._state.engine.cancel(live.engine_id)
        self._outbox.clear()
        self._collecting.clear()
        if self._timer is not None:
            self._timer.cancel()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _submit(self, submission: inference_pb2.Submission) -> None:
        if not submission.request_id or submission.request_id in self._live:
            raise field_error("request_id", "be unique on its stream and not empty", submission.request_id)
        if len(self._live) >= self._config.requests_per_stream_max:
            raise Overloaded(
                f"{len(self._live)} requests run on this stream, which is the limit; wait until some have ended"
            )
        version = self._state.check_target(submission.target, submission.session)
        request = self._engine_request(submission, version)
        if not 0 <= submission.hold_s <= HOLD_S_MAX:  # a NaN fails every comparison
            raise field_error("hold_s", f"be in [0, {HOLD_S_MAX:g}]", submission.hold_s)
        live = _Live(submission.request_id, request.request_id, version, submission.hold_s)
        if submission.traceparent and tracing.is_on():
            live.trace = RequestTrace(submission.traceparent, self._state.node_id)
        self._live[live.request_id] = live
        self._state.num_live += 1
        if version is not None:
            self._state.pin(version)
        try:
            self._to_engine(live, request)
        except MeshError:
            self._forget(live)
            raise
        if submission.target.selector == inference_pb2.Target.SELECTOR_SESSION_PINNED and version is not None:
            self._state.begin_session(submission.session, version)

    def _to_engine(self, live: _Live, request: GenerateRequest) -> None:
        try:
            self._state.engine.submit(request, lambda delta: self._on_delta(live, delta))
        except ValueError as err:
            raise InvalidInput(str(err)) from err
        except EngineBusy as err:
            raise Overloaded(f"{err}; retry later or use another node") from err
        except EngineBroken as err:
            raise EngineFailed(f"{err}; use another node") from err

    def _engine_request(self, submission: inference_pb2.Submission, version: PolicyVersion | None) -> GenerateRequest:
        token_ids = decode_ints(submission.token_ids, "token_ids")
        if not 0 <= submission.num_resumed < max(1, token_ids.size):
            must = f"be in [0, {max(0, token_ids.size - 1)}], because the prompt needs a token"
            raise field_error("num_resumed", must, submission.num_resumed)
        return GenerateRequest(
            request_id=self._prefix + submission.request_id,
            token_ids=token_ids,
            params=decode_sampling_params(submission.params),
            session=submission.session,
            priority=submission.priority,
            outputs=tuple(submission.outputs),
            num_top=submission.num_top or NUM_TOP,
            version=version,
            num_resumed=submission.num_resumed,
        )

    def _on_delta(self, live: _Live, delta: GenerateDelta) -> None:
        if self._live.get(live.request_id) is not live:
            return  # it was rejected in the meantime
        if live.version is not None and delta.token_ids.size and delta.version != live.version:
            # It was cancelled at the swap, but an engine may have sampled a token of the new weights before that.
            self._send(live)
            if live.request_id in self._live:
                self._drop(live, _dropped(live.version))
            return
        if live.version is not None and live.version not in self._state.engine.held and live.ended_by is None:
            # If the engine cancels it, because it came after the swap was announced.
            live.ended_by = _dropped(live.version)
        if live.trace is not None:
            live.trace.add(delta)
            live.trace = live.trace if delta.finish is None else None
        if delta.queued_s:
            observe(QUEUE_SECONDS, delta.queued_s, node=self._state.node_id)
        if live.collected and delta.token_ids.size and delta.version != live.collected[0].version:
            self._send(live)
        live.collected.append(delta)
        if delta.finish is not None:
            self._forget(live)
            self._send(live)
        elif not live.hold_s:
            self._send(live)
        elif len(live.collected) == 1:
            self._collect(live)

    def _collect(self, live: _Live) -> None:
        at_s = asyncio.get_running_loop().time() + live.hold_s
        self._collecting.append((at_s, live))
        if self._timer is None or at_s < self._timer.when():
            self._set_timer(at_s)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at_s, self._send_due, at_s)

    def _send_due(self, now_s: float) -> None:
        self._timer = None
        due = [live for at_s, live in self._collecting if at_s <= now_s]
        self._collecting = [(at_s, live) for at_s, live in self._collecting if at_s > now_s and live.collected]
        for live in due:
            self._send(live)
        if self._collecting:
            self._set_timer(min(at_s for at_s, _ in self._collecting))

    def _send(self, live: _Live) -> None:
        """Put the collected tokens into the outbox as one delta."""
        collected, live.collected = live.collected, []
        if not collected:
            return
        try:
            delta = collected[0] if len(collected) == 1 else _joined(collected)
            message = _encode(live, delta)
        except InvalidInput as err:
            self._drop(live, EngineFailed(f"the engine returned a malformed delta: {err.message}; use another node"))
            return
        self._append(_Waiting(message, delta.version, int(delta.token_ids.size)))

    def _append(self, waiting: _Waiting) -> None:
        self._outbox.append(waiting)
        self._outbox_tokens += waiting.num_tokens
        if self._outbox_tokens > self._config.outbox_tokens_max and self._failure is None:
            self._failure = Overloaded(
                f"{self._outbox_tokens} tokens wait for the client, more than the limit; read the stream faster"
            )
        self._wake.set()

    def _take(self) -> Iterator[inference_pb2.GenerateDelta]:
        num_tokens = 0
        while self._outbox and num_tokens < self._config.frame_tokens_max:
            head = self._outbox[0]
            if head.version is not None and not self._state.gate.admits(head.version):
                return
            self._outbox.popleft()
            num_tokens += head.num_tokens
            self._outbox_tokens -= head.num_tokens
            yield head.delta

    def _reject(self, request_id: str, err: MeshError) -> None:
        delta = inference_pb2.GenerateDelta(
            request_id=request_id, finish=types_pb2.FINISH_REASON_ERROR, failure=encode_failure(err)
        )
        self._append(_Waiting(delta, None, 0))

    def _end(self, live: _Live, err: MeshError) -> None:
        """Cancel at the engine, which emits the last tokens. `err` replaces CANCELLED."""
        live.ended_by = err
        self._state.engine.cancel(live.engine_id)

    def _drop(self, live: _Live, err: MeshError) -> None:
        """End at once, without further tokens."""
        self._forget(live)
        if live.trace is not None:
            live.trace.end(err.reason)
        self._state.engine.cancel(live.engine_id)
        self._reject(live.request_id, err)

    def _forget(self, live: _Live) -> None:
        if self._live.pop(live.request_id, None) is not None:
            self._state.num_live -= 1
            if live.version is not None:
                self._state.unpin(live.version)

    def _on_swap(self, held: Collection[PolicyVersion]) -> None:
        for live in list(self._live.values()):
            if live.version is not None and live.version not in held:
                self._end(live, _dropped(live.version))

    def _on_verdict(self) -> None:
        """After a pass, send the held deltas. After a failure, drop them and end every request."""
        failure = self._state.gate.failure
        if failure is not None:
            for live in list(self._live.values()):
                self._send(live)
            held = [w for w in self._outbox if w.version is not None and not self._state.gate.admits(w.version)]
            self._outbox = deque(w for w in self._outbox if w not in held)
            self._outbox_tokens -= sum(w.num_tokens for w in held)
            for live in list(self._live.values()):
                self._drop(live, failure)
            rejected = {w.delta.request_id for w in self._outbox if w.version is None}
            for request_id in {w.delta.request_id for w in held} - rejected:
                self._reject(request_id, failure)
        self._wake.set()


def _dropped(version: PolicyVersion) -> StaleWeights:
    return StaleWeights(
        f"the request was pinned to {version}, which an update dropped from this node; use another node"
    )


def _joined(deltas: list[GenerateDelta]) -> GenerateDelta:
    """Join deltas of one version, of which only the last may have no tokens. Raises InvalidInput if their arrays
    differ."""
    first, last = deltas[0], deltas[-1]
    parts = deltas if last.token_ids.size else deltas[:-1]
    if any(part.arrays.keys() != first.arrays.keys() for part in parts):
        raise InvalidInput("`arrays` must have the same names in all deltas of a request")

    def column(values: list[Any]) -> Any:
        return values[0] if len(values) == 1 else np.concatenate(values)

    models = [part.logprobs_model for part in parts]
    try:
        return replace(
            first,
            token_ids=column([part.token_ids for part in parts]),
            logprobs=column([part.logprobs for part in parts]),
            logprobs_model=None if any(model is None for model in models) else column(models),
            arrays={name: column([part.arrays[name] for part in parts]) for name in first.arrays},
            kv_step_oldest=oldest_kv_step((part.kv_step_oldest for part in parts), first.version),
            finish=last.finish,
            error=last.error,
        )
    except ValueError as err:
        raise InvalidInput(f"the arrays of two deltas do not fit together: {err}") from err


def _encode(live: _Live, delta: GenerateDelta) -> inference_pb2.GenerateDelta:
    message = inference_pb2.GenerateDelta(
        request_id=live.request_id,
        segment=encode_segment(delta.segment()) if delta.token_ids.size else None,
        num_prompt_cached=delta.num_prompt_cached,
        num_prompt_prefilled=delta.num_prompt_prefilled,
    )
    failure = live.ended_by
    if delta.finish is FinishReason.ERROR:
        failure = EngineFailed(f"the engine failed: {delta.error}; use another node")
    if delta.finish in (FinishReason.ERROR, FinishReason.CANCELLED) and failure is not None:
        message.finish = types_pb2.FINISH_REASON_ERROR
        message.failure.CopyFrom(encode_failure(failure))
    elif delta.finish is not None:
        message.finish = cast("types_pb2.FinishReason.ValueType", int(delta.finish))
    return message
