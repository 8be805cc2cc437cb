"""One process of the bench `publish_to_active`: a client that generates without a pause, and records when its tokens
arrive.

`python -m benchmarks.weights.publish_client` reads a `TimedClientWork` as JSON from the first line of stdin, generates
until stdin ends, and writes its arrivals as JSON. It is a separate process, so that no other work of the bench delays
what it sees.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import numpy as np

from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

PROMPT = np.arange(8, dtype="<i4")
POLL_S = 0.05
START_S_MAX = 60.0


class TimedClientWork(msgspec.Struct, frozen=True, kw_only=True):
    """The mesh, and the length of a request."""

    coordinator: str
    token: str
    max_tokens: int


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the client received in one delta."""

    time_s: float
    """On the monotonic clock of the host."""
    request: int
    step: int
    """The weights that sampled them."""
    num_tokens: int


async def generate(work: TimedClientWork, until: asyncio.Future[bytes]) -> list[Arrival]:
    """Send one request after the other until `until` is done. A request does not end before it has `max_tokens`."""
    access = Access(token=work.token)
    address = await _serving_node(work, access)
    arrivals: list[Arrival] = []
    async with open_channel(address, access=access) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate()
        number = 0
        await call.write(_request(number, work.max_tokens))
        try:
            while not until.done():
                reading = asyncio.ensure_future(call.read())
                await asyncio.wait([reading, until], return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    break
                now_s = time.monotonic()
                for delta in reading.result().deltas:
                    num_tokens = len(delta.segment.token_ids) // 4
                    if num_tokens:
                        arrivals.append(Arrival(now_s, number, delta.segment.version.step, num_tokens))
                    if delta.finish == types_pb2.FINISH_REASON_ERROR:
                        raise RuntimeError(f"the node rejected a request: {delta.failure.message}")
                    if delta.finish != types_pb2.FINISH_REASON_UNSPECIFIED:
                        number += 1
                        await call.write(_request(number, work.max_tokens))
        finally:
            call.cancel()
    return arrivals


async def _serving_node(work: TimedClientWork, access: Access) -> str:
    """Return the address of an inference node that serves weights."""
    async with open_channel(work.coordinator, access=access) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        async with asyncio.timeout(START_S_MAX):
            while True:
                request = coordinator_pb2.GetFleetRequest(kind=coordinator_pb2.NODE_KIND_INFERENCE)
                reply = await stub.GetFleet(request, timeout=START_S_MAX, wait_for_ready=True)
                for node in reply.nodes:
                    if node.HasField("active"):
                        return str(node.address)
                await asyncio.sleep(POLL_S)


def _request(number: int, max_tokens: int) -> inference_pb2.GenerateRequest:
    submission = inference_pb2.Submission(
        request_id=str(number),
        token_ids=PROMPT.tobytes(),
        params=types_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=max_tokens, seed=number),
        target=inference_pb2.Target(policy="main", selector=inference_pb2.Target.SELECTOR_AT_LEAST),
    )
    return inference_pb2.GenerateRequest(submissions=[submission])


async def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.readline(), type=TimedClientWork)
    until = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    arrivals = await generate(work, until)
    sys.stdout.buffer.write(msgspec.json.encode(arrivals) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
