"""One inference node over real gRPC: streams, targets, weights that change under running requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.endpoint_node import EndpointNode
from rollmesh.services.inference.engine import GenerateRequest, KvPolicy
from rollmesh.services.inference.generate_stream import GenerateStream
from rollmesh.services.inference.node import InferenceNode
from rollmesh.shared.codec.trajectory import decode_version, encode_sampling_params
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import SamplingParams
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import (
    ConfigError,
    InvalidInput,
    MeshError,
    Overloaded,
    ProbeMismatch,
    StaleWeights,
    Unimplemented,
    UnknownEndpoint,
    UnknownPolicy,
)
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from ..unit.shared.safetensors_files import write_safetensors
from .content_engine import ContentEngine, content_logprobs, content_of
from .weight_mesh import ACCESS, HERE, depot, inference, publish

Target = inference_pb2.Target
ERROR, STOP, LENGTH = types_pb2.FINISH_REASON_ERROR, types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
PROMPT = [3, 1, 4, 1, 5]
PROMPT_BYTES = np.array(PROMPT, "<i4").tobytes()
LONG = 100_000
SLOW_STEP_S = 0.02
"""Duration of a step, so that a response of 800 tokens takes longer than an activation and costs less than a long one
of fast steps."""


class Served:
    """A node with the weights of some steps prepared; `activate` swaps."""

    def __init__(self, node: InferenceNode, folder: Path, depot: str, stub: Any) -> None:
        self.node = node
        self.versions: list[PolicyVersion] = []
        self.stub = stub
        self._folder, self._depot = folder, depot

    @property
    def engine(self) -> ContentEngine:
        return cast(ContentEngine, self.node.engine)

    async def prepare(self, step: int) -> None:
        files = {"m.safetensors": write_safetensors(self._folder / "m.safetensors", step)}
        version, _ = await publish(self._depot, step, files, with_probes=True)
        await self.node.keeper.prepare(version, [self._depot])
        self.versions.append(version)

    async def activate(self, index: int, kv: KvPolicy = KvPolicy.RECOMPUTE, retain: Sequence[int] = ()) -> None:
        await self.node.keeper.activate(self.versions[index], kv, [self.versions[old] for old in retain])


@contextlib.asynccontextmanager
async def served(folder: Path, *, engine: str = "ContentEngine", **options: Any) -> AsyncIterator[Served]:
    """Steps 4 and 5 are prepared, 4 is active."""
    async with (
        depot(folder) as store,
        inference(folder, engine=engine, **options) as node,
        open_channel(node.address, access=ACCESS) as channel,
    ):
        it = Served(node, folder, store.address, inference_pb2_grpc.InferenceServiceStub(channel))
        for step in (4, 5):
            await it.prepare(step)
        await it.activate(0)
        yield it


def submission(
    request_id: str,
    target: Target | None = None,
    prompt: Sequence[int] = PROMPT,
    outputs: Sequence[str] = (),
    session: str = "",
    **params: Any,
) -> inference_pb2.Submission:
    return inference_pb2.Submission(
        request_id=request_id,
        target=target,
        token_ids=np.array(prompt, "<i4").tobytes(),
        params=encode_sampling_params(SamplingParams(**{"max_tokens": 32, "seed": 7, **params})),
        outputs=outputs,
        session=session,
    )


class Stream:
    """A Generate stream and everything it has said."""

    def __init__(self, stub: Any) -> None:
        self._call = stub.Generate()
        self.frames: list[inference_pb2.GenerateResponse] = []

    async def submit(self, *submissions: inference_pb2.Submission) -> None:
        await self._call.write(inference_pb2.GenerateRequest(submissions=submissions))

    async def cancel(self, request_id: str) -> None:
        cancellation = inference_pb2.Cancellation(request_id=request_id)
        await self._call.write(inference_pb2.GenerateRequest(cancellations=[cancellation]))

    def leave(self) -> None:
        self._call.cancel()

    def of(self, request_id: str) -> list[inference_pb2.GenerateDelta]:
        return [delta for frame in self.frames for delta in frame.deltas if delta.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        data = b"".join(delta.segment.token_ids for delta in self.of(request_id))
        return [int(token) for token in np.frombuffer(data, "<i4")]

    async def next(self) -> None:
        with typed_errors():
            self.frames.append(await asyncio.wait_for(self._call.read(), 20))

    async def end(self, *request_ids: str) -> inference_pb2.GenerateDelta:
        """Reads until all of them ended; returns the last delta of the last."""
        while not all(self.of(r) and self.of(r)[-1].finish for r in request_ids):
            await self.next()
        return self.of(request_ids[-1])[-1]


def at_least(step: int, incarnation: int = 0) -> Target:
    return Target(selector=Target.SELECTOR_AT_LEAST, step=step, incarnation=incarnation)


def exactly(step: int) -> Target:
    return Target(selector=Target.SELECTOR_EXACT, step=step)


PINNED = Target(selector=Target.SELECTOR_RESPONSE_PINNED, step=4)
BY_SESSION = Target(selector=Target.SELECTOR_SESSION_PINNED, step=4)


# Streams --------------------------------------------------------------------------------------------------------------


async def test_one_frame_carries_an_engine_steps_deltas_of_all_requests(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        stream = Stream(it.stub)
        ids = [f"r{i}" for i in range(16)]
        await stream.submit(*(submission(i, max_tokens=64) for i in ids))
        await stream.end(*ids)
        assert all(len(stream.tokens(i)) == 64 for i in ids)
        num_steps = it.node.engine.load().steps
        assert sum(len(frame.deltas) for frame in stream.frames) == 16 * num_steps
        assert len(stream.frames) <= num_steps


async def test_tokens_of_an_unfinished_request_are_collected_for_its_hold(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        held, timed, whole = (
            submission("held"),
            submission("timed", max_tokens=LONG),
            submission("whole", max_tokens=LONG),
        )
        held.hold_s, timed.hold_s, whole.hold_s = 1.0, 0.01, 1.0
        await stream.submit(held, timed, whole)
        await stream.end("held")
        pieces = stream.of("held")
        assert (len(stream.tokens("held")), pieces[-1].finish) == (32, LENGTH)
        assert sum(len(piece.segment.logprobs) for piece in pieces) == 32 * 4
        assert len(pieces) < 32 / 8, (
            "fewer than the steps of the engine; one on a machine that is never late by a second"
        )
        while len(stream.of("timed")) < 3:
            await stream.next()  # tokens leave after their time, without an end
        await stream.cancel("whole")
        assert (await stream.end("whole")).finish == types_pb2.FINISH_REASON_CANCELLED
        assert len(stream.tokens("whole")) >= len(stream.tokens("held"))  # cancelled, with the collected tokens
        too_long = submission("too long")
        too_long.hold_s = 1.5
        await stream.submit(too_long)
        assert "`hold_s` must be in [0, 1], got 1.5" in (await stream.end("too long")).failure.message


async def test_collected_tokens_of_two_versions_are_separate_deltas(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        request = submission("a", max_tokens=LONG)
        request.hold_s = 1.0
        await stream.submit(request)
        await asyncio.wait_for(it.engine.emitted.wait(), 20)
        await it.activate(1)
        await stream.next()
        await stream.cancel("a")
        await stream.end("a")
        steps = [delta.segment.version.step for delta in stream.of("a") if delta.HasField("segment")]
        assert steps == sorted(steps)
        assert set(steps) == {4, 5}


async def test_cancel_brings_the_tokens_so_far(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a", max_tokens=LONG), submission("b"))
        await stream.next()
        await stream.cancel("a")
        await stream.cancel("never submitted")
        last = await stream.end("b", "a")
        assert last.finish == types_pb2.FINISH_REASON_CANCELLED
        assert len(stream.tokens("a")) > 0
        assert len(stream.tokens("b")) == 32


async def test_requests_of_a_client_that_leaves_end_at_the_engine(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a", max_tokens=LONG))
        await stream.next()
        assert it.node.state.num_live == 1
        stream.leave()
        await asyncio.wait_for(it.engine.ended.wait(), 20)
        assert it.node.state.num_live == 0
        assert it.node.engine.load().num_running == 0


async def test_a_refused_request_leaves_its_stream_alive(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        stream = Stream(it.stub)
        bad = {
            "stale": (submission("stale", at_least(5)), "STALE_WEIGHTS"),
            "void": (submission("void", at_least(4, incarnation=1)), "STALE_WEIGHTS"),
            "other": (submission("other", Target(policy="critic")), "UNKNOWN_POLICY"),
            "judge": (submission("judge", Target(endpoint="judge")), "UNKNOWN_ENDPOINT"),
            "session": (submission("session", BY_SESSION), "UNIMPLEMENTED"),
            "pinned": (submission("pinned", PINNED), "UNIMPLEMENTED"),
            "empty": (submission("empty", prompt=[]), "INVALID_INPUT"),
            "vocab": (submission("vocab", prompt=[99_999]), "INVALID_INPUT"),
            "": (submission(""), "INVALID_INPUT"),
        }
        await stream.submit(*(s for s, _ in bad.values()), submission("good", at_least(4)))
        await stream.end(*bad, "good")
        for request_id, (_, reason) in bad.items():
            assert (stream.of(request_id)[-1].finish, stream.of(request_id)[-1].failure.reason) == (ERROR, reason)
        assert "ContentEngine, has one set of weights" in stream.of("pinned")[-1].failure.message
        assert stream.of("good")[-1].finish == LENGTH


async def test_a_client_that_does_not_read_loses_its_stream(tmp_path: Path) -> None:
    async with served(tmp_path, context_max=LONG) as it:
        config = InferenceConfig(directory=str(tmp_path), outbox_tokens_max=1000)
        stream = GenerateStream(it.node.state, config)
        stream.submit(submission("a", max_tokens=5000))
        it.engine.submit(_engine_request(), lambda delta: None)
        await asyncio.wait_for(it.engine.ended.wait(), 20)
        with pytest.raises(Overloaded, match="read the stream faster"):
            await stream.frame()
        stream.close()
        assert it.node.state.num_live == 0


def _engine_request() -> GenerateRequest:
    """Ends before the one it is measured against, but not before that has more tokens than the outbox holds."""
    tokens = np.array(PROMPT, np.int32)
    return GenerateRequest(request_id="clock", token_ids=tokens, params=SamplingParams(max_tokens=3000))


# Weights that change --------------------------------------------------------------------------------------------------


async def test_a_sequence_over_an_update_is_stamped_token_by_token(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=SLOW_STEP_S) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a", at_least(4), max_tokens=800))
        await stream.next()
        await it.activate(1)
        await stream.end("a")
        steps = [delta.segment.version.step for delta in stream.of("a") if delta.segment.token_ids]
        assert steps == sorted(steps)
        assert set(steps) == {4, 5}
        assert len(stream.tokens("a")) == 800


async def test_an_exact_request_ends_when_weights_change(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("exact", exactly(4), max_tokens=LONG))
        await stream.next()
        await it.activate(1)
        last = await stream.end("exact")
        assert (last.finish, last.failure.reason) == (ERROR, "STALE_WEIGHTS")
        assert {delta.segment.version.step for delta in stream.of("exact") if delta.segment.token_ids} == {4}
        await stream.submit(submission("old", exactly(4)), submission("new", exactly(5)))
        await stream.end("old", "new")
        assert stream.of("old")[-1].failure.reason == "STALE_WEIGHTS"
        assert stream.of("new")[-1].finish == LENGTH


async def test_exact_requests_of_a_retained_version_run_on_and_new_ones_begin(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG, versions_max=2) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("exact", exactly(4), max_tokens=400))
        await stream.next()
        await it.activate(1, retain=[0])
        assert it.node.state.held == (it.versions[0],)
        await stream.submit(submission("old", exactly(4)), submission("new", exactly(5)), submission("latest"))
        await stream.end("exact", "old", "new", "latest")
        for request_id, step in (("exact", 4), ("old", 4), ("new", 5), ("latest", 5)):
            assert stream.of(request_id)[-1].finish == LENGTH
            assert steps_of(stream, request_id) == {step}
        scored = await it.stub.Score(inference_pb2.ScoreRequest(target=exactly(4), token_ids=[PROMPT_BYTES]))
        assert scored.version.step == 4
        await it.node.keeper.discard(it.versions[0])
        await stream.submit(submission("late", exactly(4)))
        assert (await stream.end("late")).failure.reason == "STALE_WEIGHTS"


def steps_of(stream: Stream, request_id: str) -> set[int]:
    return {delta.segment.version.step for delta in stream.of(request_id) if delta.segment.token_ids}


@pytest.mark.parametrize("target", [PINNED, BY_SESSION])
async def test_a_pinned_response_finishes_under_the_version_that_began_it(tmp_path: Path, target: Target) -> None:
    async with served(tmp_path, step_s=SLOW_STEP_S, versions_max=2) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("alone", target, max_tokens=800))
        await stream.end("alone")
        await stream.submit(submission("pinned", target, max_tokens=800), submission("free", max_tokens=800))
        while not (stream.tokens("pinned") and stream.tokens("free")):
            await stream.next()
        await it.activate(1)
        await stream.end("pinned", "free")
        assert (steps_of(stream, "pinned"), steps_of(stream, "free")) == ({4}, {4, 5})
        assert stream.tokens("pinned") == stream.tokens("alone")


async def test_a_session_stays_with_its_version_while_the_node_holds_it(tmp_path: Path) -> None:
    async with served(tmp_path, versions_max=2) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a0", BY_SESSION, session="a"), submission("r0", PINNED, session="r"))
        await stream.end("a0", "r0")
        await it.activate(1, retain=[0])
        await stream.submit(submission("a1", BY_SESSION, session="a"), submission("b0", BY_SESSION, session="b"))
        await stream.submit(submission("r1", PINNED, session="r"))
        await stream.end("a1", "b0", "r1")
        assert [steps_of(stream, r) for r in ("a0", "a1", "b0", "r0", "r1")] == [{4}, {4}, {5}, {4}, {5}]
        newer = Target(selector=Target.SELECTOR_SESSION_PINNED, step=5)
        await stream.submit(submission("below", newer, session="a"))
        assert (await stream.end("below")).failure.reason == "STALE_WEIGHTS"
        await it.prepare(6)
        await it.activate(2)
        await stream.submit(submission("a2", BY_SESSION, session="a"), submission("c0", BY_SESSION, session="c"))
        await stream.end("a2", "c0")
        failure = stream.of("a2")[-1].failure
        assert (failure.reason, "session 'a' began under" in failure.message) == ("STALE_WEIGHTS", True)
        assert steps_of(stream, "c0") == {6}


@pytest.mark.parametrize(("retain", "survives"), [((), "on5"), ((0,), "on4")])
async def test_named_versions_stay_first_then_the_newest_with_pinned_requests(
    tmp_path: Path, retain: tuple[int, ...], survives: str
) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG, versions_max=2) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("on4", PINNED, max_tokens=LONG))
        await stream.next()
        await it.activate(1)
        await stream.submit(submission("on5", PINNED, max_tokens=LONG))
        await it.prepare(6)
        while not stream.tokens("on5"):
            await stream.next()
        await it.activate(2, retain=retain)
        dropped = "on4" if survives == "on5" else "on5"
        last = await stream.end(dropped)
        assert (last.finish, last.failure.reason) == (ERROR, "STALE_WEIGHTS")
        assert steps_of(stream, dropped) == {int(dropped[-1])}
        await stream.cancel(survives)
        assert (await stream.end(survives)).finish == types_pb2.FINISH_REASON_CANCELLED
        assert steps_of(stream, survives) == {int(survives[-1])}


async def test_probes_that_are_scored_as_a_part_of_the_activation_release_its_tokens(tmp_path: Path) -> None:
    async with served(tmp_path, engine="ScoredEngine", step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a", max_tokens=LONG))
        await stream.next()
        await it.activate(1)
        while 5 not in steps_of(stream, "a"):
            await stream.next()


@pytest.mark.parametrize("engine", ["StuckEngine", "StuckScoredEngine"])
async def test_no_token_of_wrong_weights_leaves_the_node(tmp_path: Path, engine: str) -> None:
    async with served(tmp_path, engine=engine, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a", max_tokens=LONG))
        await stream.next()
        with pytest.raises(ProbeMismatch):
            await it.activate(1)
        last = await stream.end("a")
        assert last.failure.reason == "PROBE_MISMATCH"
        assert {delta.segment.version.step for delta in stream.of("a") if delta.segment.token_ids} == {4}
        assert it.node.engine.load().num_running == 0
        await stream.submit(submission("b"))
        assert (await stream.end("b")).failure.reason == "PROBE_MISMATCH"
        with pytest.raises(ProbeMismatch), typed_errors():
            await it.stub.Score(inference_pb2.ScoreRequest(token_ids=[np.array(PROMPT, "<i4").tobytes()]))


async def test_tokens_wait_for_the_verdict_and_then_all_come(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a", max_tokens=200))
        await stream.next()
        it.node.state.announce_swap(it.versions[1])  # as before a swap, with a verdict that takes its time
        await it.node.engine.activate(it.versions[1], KvPolicy.RECOMPUTE)
        await asyncio.wait_for(it.engine.ended.wait(), 20)
        seen = {delta.segment.version.step for delta in stream.of("a") if delta.segment.token_ids}
        assert seen == {4}
        it.node.state.gate.release()
        await stream.end("a")
        assert len(stream.tokens("a")) == 200


# Unary ----------------------------------------------------------------------------------------------------------------


async def test_generate_one_answers_by_version(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        request = inference_pb2.GenerateOneRequest(submission=submission("x", outputs=["entropy"], max_tokens=400))
        answering = asyncio.create_task(_call(it.stub.GenerateOne(request)))
        await asyncio.wait_for(it.engine.emitted.wait(), 20)
        await it.activate(1)
        answer = await answering
        assert [decode_version(delta.segment.version).step for delta in answer.deltas] == [4, 5]
        assert sum(len(delta.segment.token_ids) for delta in answer.deltas) == 4 * 400
        assert answer.deltas[-1].finish == LENGTH
        assert all(
            delta.segment.arrays["entropy"].shape[0] == len(delta.segment.token_ids) // 4 for delta in answer.deltas
        )


async def test_generate_one_rejects_an_unknown_output(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        request = inference_pb2.GenerateOneRequest(submission=submission("x", outputs=["hidden"]))
        with pytest.raises(
            InvalidInput, match=r"outputs must be among \[entropy, kept_mass, mean_logprob, top_k\].*got \[hidden\]"
        ):
            await _call(it.stub.GenerateOne(request))


async def _call(call: Any) -> Any:
    with typed_errors():
        return await call


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (at_least(5), StaleWeights),
        (exactly(3), StaleWeights),
        (Target(policy="critic"), UnknownPolicy),
        (Target(endpoint="judge"), UnknownEndpoint),
        (Target(selector=Target.SELECTOR_SESSION_PINNED), Unimplemented),
    ],
)
async def test_unary_calls_are_refused_by_target(tmp_path: Path, target: Target, error: type[MeshError]) -> None:
    async with served(tmp_path) as it:
        with pytest.raises(error), typed_errors():
            await it.stub.GenerateOne(inference_pb2.GenerateOneRequest(submission=submission("x", target)))
        request = inference_pb2.ScoreRequest(target=target, token_ids=[np.array(PROMPT, "<i4").tobytes()])
        with pytest.raises(error), typed_errors():
            await it.stub.Score(request)


async def test_a_node_of_an_endpoint_serves_its_weights_and_no_policy(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    write_safetensors(tmp_path / "weights" / "model.safetensors", 9)
    config = InferenceConfig(directory=str(tmp_path / "node"), engine=Extension("content_engine.py:ContentEngine"))
    async with (
        EndpointNode(
            config, node_id="e", access=ACCESS, endpoint="judge", weights=tmp_path / "weights", base_dir=HERE
        ) as node,
        open_channel(node.address, access=ACCESS) as channel,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.ScoreRequest(target=Target(endpoint="judge"), token_ids=[PROMPT_BYTES])
        reply = await stub.Score(request)
        expected = content_logprobs(
            content_of({"m": tmp_path / "weights" / "model.safetensors"}), np.array(PROMPT, np.int32)
        )
        np.testing.assert_array_equal(np.frombuffer(reply.logprobs[0], "<f4"), expected)
        assert (reply.version.policy, reply.version.step) == ("judge", 0)
        assert node.hello().active == reply.version
        for target, error in ((Target(endpoint="other"), UnknownEndpoint), (at_least(0), UnknownPolicy)):
            with pytest.raises(error, match="serves endpoint 'judge', not"), typed_errors():
                await stub.Score(inference_pb2.ScoreRequest(target=target, token_ids=[PROMPT_BYTES]))


async def test_a_folder_without_weights_is_an_error_of_the_table(tmp_path: Path) -> None:
    config = InferenceConfig(directory=str(tmp_path / "node"), engine=Extension("content_engine.py:ContentEngine"))
    with pytest.raises(ConfigError, match=r"`endpoints.judge.model`: .* has no file \*.safetensors"):
        async with EndpointNode(config, node_id="e", access=ACCESS, endpoint="judge", weights=tmp_path, base_dir=HERE):
            pass


async def test_score_is_that_of_the_active_weights(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        tokens = np.array(PROMPT, np.int32)
        reply = await it.stub.Score(inference_pb2.ScoreRequest(target=exactly(4), token_ids=[tokens.tobytes()]))
        write_safetensors(tmp_path / "again.safetensors", 4)
        expected = content_logprobs(content_of({"m": tmp_path / "again.safetensors"}), tokens)
        np.testing.assert_array_equal(np.frombuffer(reply.logprobs[0], "<f4"), expected)
        assert reply.version.step == 4


async def test_load_names_the_active_version_and_counts(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a"))
        await stream.end("a")
        load = await it.stub.GetLoad(inference_pb2.GetLoadRequest())
        assert (load.active.step, load.num_running, load.tokens_generated) == (4, 0, 32)
        assert load.tokens_prefilled == len(PROMPT)


async def test_a_draining_node_refuses_and_hands_back_what_runs(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.001, context_max=LONG) as it:
        stream = Stream(it.stub)
        await stream.submit(submission("a", max_tokens=LONG))
        await stream.next()
        await it.node.finish()
        last = await stream.end("a")
        assert (last.failure.reason, len(stream.tokens("a")) > 0) == ("DRAINING", True)
        await stream.submit(submission("b"))
        assert (await stream.end("b")).failure.reason == "DRAINING"
