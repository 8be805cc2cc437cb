"""InferenceService: translate between protobuf and the engine. `state` decides what is served, `gate` which tokens may
leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import EngineBroken
from rollmesh.services.inference.generate_stream import GenerateStream
from rollmesh.services.inference.state import ServingState, mismatch
from rollmesh.shared.clients.generated import merged
from rollmesh.shared.codec.arrays import decode_ints, encode_array, encode_floats
from rollmesh.shared.codec.failure import decode_failure
from rollmesh.shared.codec.trajectory import decode_segment, encode_segment, encode_version
from rollmesh.shared.domain.outputs import NUM_TOP
from rollmesh.shared.domain.trajectory import FinishReason
from rollmesh.shared.errors import EngineFailed, InvalidInput, MeshError, Overloaded, StaleWeights, field_error
from rollmesh.shared.rpc.handlers import Context
from rollmesh.v1 import inference_pb2, inference_pb2_grpc, types_pb2


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The service of one node."""

    def __init__(self, state: ServingState, config: InferenceConfig) -> None:
        self._state = state
        self._config = config
        self._streams: set[GenerateStream] = set()

    async def Generate(
        self, request_iterator: AsyncIterator[inference_pb2.GenerateRequest], context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if len(self._streams) >= self._config.streams_max:
            raise Overloaded(
                f"{len(self._streams)} streams are open, which is the limit; use one stream for all requests of a "
                "client"
            )
        stream = self._open()
        reader = asyncio.create_task(_read(request_iterator, stream))
        try:
            while deltas := await stream.frame():
                yield inference_pb2.GenerateResponse(deltas=deltas, load=stream.load())
        finally:
            reader.cancel()
            self._close(stream)
            await asyncio.wait([reader])

    async def GenerateOne(
        self, request: inference_pb2.GenerateOneRequest, context: Context
    ) -> inference_pb2.GenerateOneResponse:
        stream = self._open()
        deltas: list[inference_pb2.GenerateDelta] = []
        try:
            stream.submit(request.submission)
            stream.end_input()
            while frame := await stream.frame():
                deltas += frame
        finally:
            self._close(stream)
        if deltas[-1].finish == types_pb2.FINISH_REASON_ERROR:
            raise decode_failure(deltas[-1].failure)
        return inference_pb2.GenerateOneResponse(deltas=_joined(deltas))

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        only = self._state.check_target(request.target)
        if not request.token_ids:
            raise field_error("token_ids", "have at least one sequence", None)
        sequences = [decode_ints(data, f"token_ids[{i}]") for i, data in enumerate(request.token_ids)]
        try:
            results = await self._state.engine.score(
                sequences, version=only, outputs=tuple(request.outputs), num_top=request.num_top or NUM_TOP
            )
        except ValueError as err:
            if only is not None and only not in self._state.engine.held:
                raise StaleWeights(f"an update dropped {only} while the request waited; use another node") from err
            raise InvalidInput(str(err)) from err
        except EngineBroken as err:
            raise EngineFailed(f"{err}; use another node") from err
        version = results[0].version
        if any(result.version != version for result in results):
            raise EngineFailed("the engine scored under a mix of versions; retry")
        if (stale := mismatch(request.target, version)) is not None:  # weights changed while it waited
            raise stale
        await self._state.gate.verdict(version)
        response = inference_pb2.ScoreResponse(
            logprobs=[encode_floats(result.logprobs) for result in results], version=encode_version(version)
        )
        if request.outputs:
            for result in results:
                scored = response.arrays.add()
                for name, values in result.arrays.items():
                    scored.arrays[name].CopyFrom(encode_array(values, f"arrays[{name}]"))
        return response

    async def GetLoad(self, request: inference_pb2.GetLoadRequest, context: Context) -> inference_pb2.GetLoadResponse:
        load = self._state.engine.load()
        active = self._state.active
        return inference_pb2.GetLoadResponse(
            active=encode_version(active) if active is not None else None,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            slots_max=load.slots_max,
            kv_tokens_used=load.kv_tokens_used,
            kv_tokens_max=load.kv_tokens_max,
            tokens_generated=load.tokens_generated,
            tokens_prefilled=load.tokens_prefilled,
            tokens_prefix_hit=load.tokens_prefix_hit,
            steps=load.steps,
            forward=load.forward,
        )

    def end_all(self, err: MeshError) -> None:
        """End every request of every stream with `err`, after the tokens that it has."""
        for stream in list(self._streams):
            stream.end_all(err)

    def _open(self) -> GenerateStream:
        stream = GenerateStream(self._state, self._config)
        self._streams.add(stream)
        return stream

    def _close(self, stream: GenerateStream) -> None:
        self._streams.discard(stream)
        stream.close()


async def _read(requests: AsyncIterator[inference_pb2.GenerateRequest], stream: GenerateStream) -> None:
    failure: BaseException | None = None
    try:
        async for request in requests:
            for submission in request.submissions:
                stream.submit(submission)
            for cancellation in request.cancellations:
                stream.cancel(cancellation.request_id)
    except Exception as err:  # noqa: BLE001 (handed to the handler of this call, which raises it)
        failure = err
    stream.end_input(failure)


def _joined(deltas: list[inference_pb2.GenerateDelta]) -> list[inference_pb2.GenerateDelta]:
    """Return one delta per version; the first has the prompt counts, the last the finish."""
    pieces = [decode_segment(delta.segment) for delta in deltas if delta.HasField("segment")]
    segments = merged(pieces, FinishReason.UNFINISHED)
    joined = [inference_pb2.GenerateDelta(segment=encode_segment(segment)) for segment in segments]
    joined = joined or [inference_pb2.GenerateDelta()]
    joined[0].num_prompt_cached = deltas[0].num_prompt_cached
    joined[0].num_prompt_prefilled = deltas[0].num_prompt_prefilled
    joined[-1].finish = deltas[-1].finish
    for delta in joined:
        delta.request_id = deltas[0].request_id
    return joined
